-- finish: running → succeeded, as the last statement of the job's own transaction, so that its writes and its success
-- commit together. Raises AQ003 when the transaction is no longer the job's (check_transaction), AQ002 when the job is no
-- longer this worker's: then nothing of it can commit. Locks one live row, served by live_pkey.
-- p_settings: what is to be checked. The loop is check_transaction's own, which is called to say what is wrong: a function less.
-- Older code gives it as p_expected, an object.
-- The limited keys that it held are free with the commit; the worker unparks after it. Also those that its claim has not given it,
-- but settle_limits; they are looked for as in record.
CREATE OR REPLACE FUNCTION aioqueue.finish(
    p_worker bigint, p_lane bigint, p_vt bigint, p_job_id uuid, p_attempt integer,
    p_expected jsonb, p_result jsonb, p_settings text[] DEFAULT NULL
) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
DECLARE began timestamptz; spares integer;
BEGIN
    IF p_settings IS NULL THEN
        SELECT array_agg(ARRAY[e.key, e.value]) INTO p_settings FROM jsonb_each_text(p_expected) AS e (key, value);
    END IF;
    FOR i IN 1..coalesce(array_length(p_settings, 1), 0) LOOP
        IF current_setting(p_settings[i][1], true) IS DISTINCT FROM p_settings[i][2] THEN
            PERFORM aioqueue.check_transaction(p_settings);
        END IF;
    END LOOP;
    DELETE FROM aioqueue.live l
     WHERE l.lane = p_lane AND l.vt = p_vt AND l.job_id = p_job_id AND l.worker = p_worker AND l.attempt = p_attempt
    RETURNING l.claimed_at, l.spared INTO began, spares;
    IF NOT FOUND THEN
        RAISE EXCEPTION USING ERRCODE = 'AQ002', MESSAGE = 'job ' || p_job_id || ' is no longer owned by worker ' || p_worker;
    END IF;
    IF pg_relation_size('aioqueue.held'::regclass) > 0 THEN
        DELETE FROM aioqueue.held h WHERE h.job_id = p_job_id;
    END IF;
    INSERT INTO aioqueue.outcome (job_id, state, attempt, spared, result, started_at, finished_at)
    VALUES (p_job_id, 'succeeded', p_attempt, spares, p_result, began, clock_timestamp());
END $$;
