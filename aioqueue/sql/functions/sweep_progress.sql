-- sweep_progress: deletes up to p_limit reports that count no more: of claims that are over (a process died between the end of a
-- job and its next report), and those that a later one of the same attempt has replaced. Returns the number.
-- Reads all of progress, a row for each running job that reports; so it is called at a worker's start and every few minutes.
-- Served by live_job and progress_pkey, one probe for each row. Safe to run in parallel: a row is deleted once.
CREATE OR REPLACE FUNCTION aioqueue.sweep_progress(p_limit integer) RETURNS integer
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off SET plan_cache_mode = force_generic_plan
SET enable_bitmapscan = off SET enable_sort = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE swept integer;
BEGIN
    DELETE FROM aioqueue.progress p WHERE p.ctid = ANY (ARRAY(
        SELECT x.ctid FROM aioqueue.progress x
               LEFT JOIN LATERAL (SELECT l.job_id FROM aioqueue.live l WHERE l.job_id = x.job_id AND l.worker = x.worker
                                   AND l.attempt = x.attempt LIMIT 1) o ON true
               LEFT JOIN LATERAL (SELECT y.number FROM aioqueue.progress y WHERE y.job_id = x.job_id AND y.attempt = x.attempt
                                   AND y.number > x.number LIMIT 1) n ON true
         WHERE o.job_id IS NULL OR n.number IS NOT NULL LIMIT p_limit));
    GET DIAGNOSTICS swept = ROW_COUNT;
    RETURN swept;
END $$;
