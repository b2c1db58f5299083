-- job_status: where one job stands, without its payload and result; no row: unknown, or not of p_tenant (NULL: any).
-- Changes nothing. Served by the primary keys and job_id indexes through the view jobs.
CREATE OR REPLACE FUNCTION aioqueue.job_status(p_job_id uuid, p_tenant text DEFAULT NULL)
RETURNS TABLE (id uuid, task text, queue text, priority smallint, tenant text, state text, attempt integer, spared integer,
               max_attempts integer, created_at timestamptz, run_at timestamptz, started_at timestamptz, finished_at timestamptz,
               worker bigint, retry_of uuid, error_attempt integer, reason text, error_type text, error_message text,
               traceback text, error_worker bigint, error_started_at timestamptz, error_finished_at timestamptz)
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    SELECT j.id, j.task, j.queue, j.priority, j.tenant, j.state, j.attempt, j.spared, j.max_attempts, j.created_at, j.run_at,
           j.started_at, j.finished_at, j.worker, j.retry_of, a.attempt, a.reason, a.error_type, a.error_message, a.traceback,
           a.worker, a.started_at, a.finished_at
      FROM aioqueue.jobs j
      LEFT JOIN LATERAL (SELECT * FROM aioqueue.attempt b WHERE b.job_id = j.id ORDER BY b.attempt DESC LIMIT 1) a ON true
     WHERE j.id = p_job_id AND (p_tenant IS NULL OR coalesce(j.tenant, '') = p_tenant);
END $$;
