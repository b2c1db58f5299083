-- unpark: parked → ready, after jobs that held keys have ended: for each key as many as p_wanted says, if it has room.
-- In a transaction of its own, after the commit that ended them: whoever claims at that moment has the keys' locks, and has
-- parked before we look. Nothing else is locked; a commit that a crash loses is made up for by sweep_parked.
-- p_held, p_parked: {key: position} below which the caller knows of no such row; {} begins at the start.
-- Returns the number made ready, and for each key where its first parked row now stands.
CREATE OR REPLACE FUNCTION aioqueue.unpark(
    p_keys bigint[], p_wanted integer[], p_held jsonb, p_parked jsonb, OUT moved integer, OUT firsts bigint[]
) LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    x record; idle bigint[] := aioqueue.paused_lanes();
BEGIN
    PERFORM set_config('synchronous_commit', 'off', true);
    PERFORM aioqueue.lock_keys(p_keys);
    moved := 0; firsts := '{}';
    FOR i IN 1..cardinality(p_keys) LOOP
        SELECT u.* INTO x FROM aioqueue.unpark_key(
            p_keys[i], p_wanted[i], coalesce((p_held ->> p_keys[i]::text)::bigint, 0), coalesce((p_parked ->> p_keys[i]::text)::bigint, 0), 1000, idle) AS u;
        moved := moved + x.moved;
        firsts := firsts || x.first;
    END LOOP;
END $$;
