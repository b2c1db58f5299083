-- prune_default: deletes up to p_limit ended jobs from DEFAULT, where what outlived its range and ids of wrong clocks stand:
-- successes older than p_succeeded seconds, dead and cancelled ones older than p_unsuccessful. Returns the number.
-- Served by outcome_default_finished; rows are locked SKIP LOCKED, so several may run side by side.
CREATE OR REPLACE FUNCTION aioqueue.prune_default(p_succeeded double precision, p_unsuccessful double precision, p_limit integer) RETURNS integer
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    at timestamptz := clock_timestamp(); which text; found uuid[]; deleted integer := 0;
BEGIN
    FOREACH which IN ARRAY ARRAY['succeeded', 'dead', 'cancelled'] LOOP
        WITH d AS (
            DELETE FROM aioqueue.outcome_default o WHERE o.ctid = ANY (ARRAY(
                   SELECT x.ctid FROM aioqueue.outcome_default x
                    WHERE x.state = which
                      AND x.finished_at < at - make_interval(secs => CASE which WHEN 'succeeded' THEN p_succeeded ELSE p_unsuccessful END)
                    ORDER BY x.finished_at LIMIT p_limit - deleted FOR UPDATE SKIP LOCKED))
            RETURNING o.job_id)
        SELECT coalesce(array_agg(d.job_id), '{}') INTO found FROM d;
        DELETE FROM aioqueue.attempt_default a WHERE a.job_id = ANY (found);
        DELETE FROM aioqueue.job_default j WHERE j.id = ANY (found);
        deleted := deleted + cardinality(found);
    END LOOP;
    RETURN deleted;
END $$;
