-- rescue_job: one job of a lost worker, its live row locked by the caller → ready at once after the first loss, scheduled
-- with back-off and full jitter after later ones, dead when that was its last attempt.
CREATE OR REPLACE FUNCTION aioqueue.rescue_job(p_row aioqueue.live) RETURNS text
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    lost integer; last boolean;
BEGIN
    SELECT count(*) INTO lost FROM (
        SELECT FROM aioqueue.attempt a WHERE a.job_id = p_row.job_id AND a.reason = 'worker lost' LIMIT 12) x;
    SELECT p_row.attempt - p_row.spared >= j.max_attempts INTO last FROM aioqueue.job j WHERE j.id = p_row.job_id;
    RETURN aioqueue.return_job(
        p_row, 'worker lost', NULL, 'worker ' || p_row.worker || ' was lost while it ran attempt ' || p_row.attempt, NULL,
        CASE WHEN last THEN NULL WHEN lost = 0 THEN 0 ELSE pg_catalog.random() * least(3600, 2.0 ^ lost) END, false, NULL);
END $$;
