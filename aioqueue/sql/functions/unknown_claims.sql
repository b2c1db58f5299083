-- unknown_claims: what a living worker runs by its rows: some of it unknown to it, when the answer to a claim was lost.
-- Changes nothing; the worker hands back what it does not know. Scans live, so it is called only after a claim had no answer.
CREATE OR REPLACE FUNCTION aioqueue.unknown_claims(p_worker bigint)
RETURNS TABLE (job_id uuid, lane bigint, vt bigint, attempt integer, spared integer, tenant text, keys bigint[])
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET jit = off AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY SELECT l.job_id, l.lane, l.vt, l.attempt, l.spared, nullif(l.tenant, ''),
                        ARRAY(SELECT h.key FROM aioqueue.held h WHERE h.job_id = l.job_id)
                   FROM aioqueue.live l WHERE l.worker = p_worker;
END $$;
