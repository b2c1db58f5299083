-- end_job: one job whose live row was just locked by the caller → dead or cancelled: the row goes, the outcome comes.
CREATE OR REPLACE FUNCTION aioqueue.end_job(p_row aioqueue.live, p_state text, p_message text) RETURNS text
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    DELETE FROM aioqueue.live l WHERE l.lane = p_row.lane AND l.vt = p_row.vt AND l.job_id = p_row.job_id;
    INSERT INTO aioqueue.outcome (job_id, state, attempt, spared, message, started_at, finished_at)
    VALUES (p_row.job_id, p_state, p_row.attempt, p_row.spared, p_message, p_row.claimed_at, pg_catalog.clock_timestamp());
    RETURN p_state;
END $$;
