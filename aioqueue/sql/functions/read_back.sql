-- read_back: what became of a job whose COMMIT had no answer: 'succeeded', 'ours' (nothing was committed) or 'lost'.
-- Locks the live row, so it waits for the commit that may still be under way; then reads the outcome in a new statement.
CREATE OR REPLACE FUNCTION aioqueue.read_back(p_worker bigint, p_lane bigint, p_vt bigint, p_job_id uuid, p_attempt integer)
RETURNS text
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off AS $$
BEGIN
    PERFORM FROM aioqueue.live l
      WHERE l.lane = p_lane AND l.vt = p_vt AND l.job_id = p_job_id AND l.worker = p_worker AND l.attempt = p_attempt FOR UPDATE;
    IF FOUND THEN
        RETURN 'ours';
    END IF;
    PERFORM FROM aioqueue.outcome o WHERE o.job_id = p_job_id AND o.attempt = p_attempt AND o.state = 'succeeded';
    RETURN CASE WHEN FOUND THEN 'succeeded' ELSE 'lost' END;
END $$;
