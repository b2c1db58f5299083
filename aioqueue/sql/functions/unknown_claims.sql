-- unknown_claims: running jobs of a living worker that it does not know of, because the answer to its claim was lost.
-- Changes nothing; the worker hands them back. Scans live, so it is called only after a claim had no answer.
CREATE OR REPLACE FUNCTION aioqueue.unknown_claims(p_worker bigint, p_known uuid[])
RETURNS TABLE (job_id uuid, lane bigint, vt bigint, attempt integer, spared integer, tenant text)
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET jit = off AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY SELECT l.job_id, l.lane, l.vt, l.attempt, l.spared, nullif(l.tenant, '') FROM aioqueue.live l
                  WHERE l.worker = p_worker AND l.job_id <> ALL (p_known);
END $$;
