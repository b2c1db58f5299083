-- return_job: one job whose live row was just locked by the caller: running → ready, scheduled, dead or cancelled.
-- Writes the attempt's row and lets go of the keys that the job held; a request to cancel wins over everything. p_delay NULL: dead. A delay above zero goes to
-- scheduled (XID first, then the clock), zero to live at a new position, both in p_lane. Returns the new state.
-- A job handed back more than 20 times in a row waits 1 s, doubling to a minute, so that it cannot spin.
CREATE OR REPLACE FUNCTION aioqueue.return_job(
    p_row aioqueue.live, p_lane bigint, p_reason text, p_error_type text, p_error_message text, p_traceback text,
    p_delay double precision, p_spare boolean, p_unknown_task text
) RETURNS text
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    at timestamptz; wait double precision := p_delay; in_a_row integer;
BEGIN
    PERFORM pg_catalog.pg_current_xact_id();
    at := pg_catalog.clock_timestamp();
    INSERT INTO aioqueue.attempt (job_id, attempt, reason, error_type, error_message, traceback, worker, started_at, finished_at)
    VALUES (p_row.job_id, p_row.attempt, p_reason, p_error_type, p_error_message, p_traceback, p_row.worker, p_row.claimed_at, at);
    DELETE FROM aioqueue.held h WHERE h.job_id = p_row.job_id;
    DELETE FROM aioqueue.cancel c WHERE c.job_id = p_row.job_id;
    IF FOUND OR p_reason = 'cancelled' THEN
        RETURN aioqueue.end_job(p_row, 'cancelled', coalesce(p_error_message, 'cancelled'));
    END IF;
    IF p_delay IS NULL THEN
        RETURN aioqueue.end_job(p_row, 'dead', p_error_message);
    END IF;
    IF p_spare AND p_row.spared >= 20 AND p_reason <> 'snoozed' THEN
        SELECT count(*) INTO in_a_row FROM (
            SELECT a.reason FROM aioqueue.attempt a WHERE a.job_id = p_row.job_id ORDER BY a.attempt DESC LIMIT 27) x
         WHERE x.reason IN ('interrupted', 'unknown task', 'no connection');
        IF in_a_row > 20 THEN
            wait := greatest(wait, least(60, 2.0 ^ (in_a_row - 21)));
        END IF;
    END IF;
    DELETE FROM aioqueue.live l WHERE l.lane = p_row.lane AND l.vt = p_row.vt AND l.job_id = p_row.job_id;
    IF wait > 0 THEN
        INSERT INTO aioqueue.scheduled (run_at, job_id, lane, tenant, attempt, spared, unknown_task)
        VALUES (at + pg_catalog.make_interval(secs => wait), p_row.job_id, p_lane, p_row.tenant, p_row.attempt,
                p_row.spared + p_spare::integer, p_unknown_task);
        RETURN 'scheduled';
    END IF;
    PERFORM aioqueue.make_ready(ARRAY[p_lane], ARRAY[p_row.job_id], ARRAY[p_row.tenant], ARRAY[p_row.attempt],
                                ARRAY[p_row.spared + p_spare::integer]);
    RETURN 'ready';
END $$;
