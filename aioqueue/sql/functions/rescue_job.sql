-- rescue_job: one job of a lost worker, its live row locked by the caller → ready at once after the first loss, scheduled
-- with back-off and full jitter after later ones, dead when that was its last attempt.
-- From the second loss on it is a suspect and goes to its queue's suspect lane (priority 9, which no job has), of which a
-- process runs one job at a time and nothing beside it, so that it takes no neighbours with it. There it stays.
-- What the lost worker has reported of the job goes.
CREATE OR REPLACE FUNCTION aioqueue.rescue_job(p_row aioqueue.live) RETURNS text
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    lost integer; last boolean; suspects bigint;
BEGIN
    DELETE FROM aioqueue.progress p WHERE p.job_id = p_row.job_id AND p.attempt = p_row.attempt;
    SELECT count(*) INTO lost FROM (
        SELECT FROM aioqueue.attempt a WHERE a.job_id = p_row.job_id AND a.reason = 'worker lost' LIMIT 12) x;
    SELECT p_row.attempt - p_row.spared >= j.max_attempts, aioqueue.lane(j.queue, 9) INTO last, suspects
      FROM aioqueue.job j WHERE j.id = p_row.job_id;
    RETURN aioqueue.return_job(
        p_row, CASE WHEN lost = 0 THEN p_row.lane ELSE suspects END, 'worker lost', NULL,
        'worker ' || p_row.worker || ' was lost while it ran attempt ' || p_row.attempt, NULL,
        CASE WHEN last THEN NULL WHEN lost = 0 THEN 0 ELSE pg_catalog.random() * least(3600, 2.0 ^ lost) END, false, NULL);
END $$;
