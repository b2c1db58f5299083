-- read_outcomes: for every waiter of a process at once: which of these jobs have ended, and how. Jobs still under way give
-- a row with state NULL, unknown ones (or another tenant's, p_tenants[i] NULL: any) none. Changes nothing.
-- Served by job_pkey and outcome_pkey, one probe each. The result comes as JSON text.
CREATE OR REPLACE FUNCTION aioqueue.read_outcomes(p_job_ids uuid[], p_tenants text[])
RETURNS TABLE (job_id uuid, state text, attempt integer, result text, message text, error_type text, error_message text)
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    SELECT j.id, o.state, o.attempt, o.result::text, o.message, a.error_type, a.error_message
      FROM unnest(p_job_ids, p_tenants) AS u (id, tenant),
           LATERAL (SELECT b.id FROM aioqueue.job b WHERE b.id = u.id AND (u.tenant IS NULL OR b.tenant = u.tenant) LIMIT 1) j
      LEFT JOIN LATERAL (SELECT * FROM aioqueue.outcome b WHERE b.job_id = j.id LIMIT 1) o ON true
      LEFT JOIN LATERAL (SELECT b.error_type, b.error_message FROM aioqueue.attempt b
                          WHERE o.state <> 'succeeded' AND b.job_id = j.id ORDER BY b.attempt DESC LIMIT 1) a ON true;
END $$;
