-- unpark_freed: for the end of a transaction that ended jobs of others (rescue): locks the keys that these jobs held, one entry
-- for each, and makes as many parked jobs ready. Whoever claims meanwhile has parked before we have the locks, or counts after
-- our commit. Keys may be none. p_held, p_parked: as unpark's.
CREATE OR REPLACE FUNCTION aioqueue.unpark_freed(p_keys bigint[], p_held jsonb, p_parked jsonb) RETURNS void
LANGUAGE plpgsql VOLATILE
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
    PERFORM aioqueue.lock_keys(p_keys);
    PERFORM aioqueue.unpark_key(k.key, k.number::integer, coalesce((p_held ->> k.key::text)::bigint, 0),
                                coalesce((p_parked ->> k.key::text)::bigint, 0), 1000, aioqueue.paused_lanes())
       FROM (SELECT u.key, count(*) AS number FROM unnest(p_keys) AS u (key) GROUP BY u.key) k;
END $$;
