-- promote: scheduled → ready, for up to p_limit jobs that are due, oldest first, at new positions of their lanes.
-- One promoter at a time (a try-lock of the transaction): concurrent ones would tie. Returns the number promoted, -1 when
-- another is at it. XID first. Locks scheduled rows in (run_at, job_id) order, SKIP LOCKED. Served by scheduled_pkey from
-- the floor p_from, below which nothing is left.
CREATE OR REPLACE FUNCTION aioqueue.promote(p_from timestamptz, p_limit integer) RETURNS integer
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    at timestamptz := clock_timestamp();
    ids uuid[]; lanes bigint[]; tenants text[]; attempts integer[]; spareds integer[];
BEGIN
    IF NOT pg_try_advisory_xact_lock(hashtextextended('aioqueue.promote', 0)) THEN
        RETURN -1;
    END IF;
    PERFORM pg_current_xact_id();
    WITH d AS (
        DELETE FROM aioqueue.scheduled s WHERE s.ctid = ANY (ARRAY(
               SELECT x.ctid FROM aioqueue.scheduled x WHERE x.run_at >= p_from AND x.run_at <= at
                ORDER BY x.run_at, x.job_id LIMIT p_limit FOR UPDATE SKIP LOCKED))
        RETURNING s.*)
    SELECT array_agg(d.job_id), array_agg(d.lane), array_agg(d.tenant), array_agg(d.attempt), array_agg(d.spared)
      INTO ids, lanes, tenants, attempts, spareds FROM (SELECT * FROM d ORDER BY d.run_at, d.job_id) d;
    IF ids IS NULL THEN
        RETURN 0;
    END IF;
    PERFORM aioqueue.make_ready(lanes, ids, tenants, attempts, spareds);
    RETURN cardinality(ids);
END $$;
