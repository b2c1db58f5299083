-- follow: for everybody in a process who watches jobs, at once: read_outcomes, and of jobs under way the state, the attempt and
-- the last report of that very claim. Unknown jobs (or another tenant's, p_tenants[i] NULL: any) give no row. Changes nothing.
-- Served by live_job, scheduled_job, parked_job and progress_pkey (from its new end), one probe each, beside what read_outcomes takes.
CREATE OR REPLACE FUNCTION aioqueue.follow(p_job_ids uuid[], p_tenants text[])
RETURNS TABLE (job_id uuid, state text, attempt integer, result text, message text, error_type text, error_message text,
               stage text, value double precision, note text, reported_at timestamptz)
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    SELECT r.job_id, r.state, coalesce(r.attempt, l.attempt, s.attempt, k.attempt), r.result, r.message, r.error_type, r.error_message,
           CASE WHEN r.state IS NOT NULL THEN r.state
                WHEN l.worker IS NOT NULL THEN 'running'
                WHEN l.job_id IS NOT NULL OR k.job_id IS NOT NULL THEN 'ready'
                WHEN s.job_id IS NOT NULL THEN 'scheduled' END,
           p.value, p.message, p.reported_at
      FROM aioqueue.read_outcomes(p_job_ids, p_tenants) r
      LEFT JOIN LATERAL (SELECT b.job_id, b.attempt, b.worker FROM aioqueue.live b
                          WHERE r.state IS NULL AND b.job_id = r.job_id LIMIT 1) l ON true
      LEFT JOIN LATERAL (SELECT b.job_id, b.attempt FROM aioqueue.scheduled b
                          WHERE r.state IS NULL AND l.job_id IS NULL AND b.job_id = r.job_id LIMIT 1) s ON true
      LEFT JOIN LATERAL (SELECT b.job_id, b.attempt FROM aioqueue.parked b
                          WHERE r.state IS NULL AND l.job_id IS NULL AND s.job_id IS NULL AND b.job_id = r.job_id LIMIT 1) k ON true
      LEFT JOIN LATERAL (SELECT b.value, b.message, b.reported_at FROM aioqueue.progress b
                          WHERE b.job_id = l.job_id AND b.attempt = l.attempt AND b.worker = l.worker
                          ORDER BY b.number DESC LIMIT 1) p ON true;
END $$;
