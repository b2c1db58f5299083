-- confirm: the last statement of a transaction that a job opened on the way (ctx.transaction()): the job must still be this
-- worker's, and stays so until the commit (FOR KEY SHARE; rescue skips the row). Raises AQ002 or AQ003 as finish does, and
-- takes what is checked as finish does.
CREATE OR REPLACE FUNCTION aioqueue.confirm(
    p_worker bigint, p_lane bigint, p_vt bigint, p_job_id uuid, p_attempt integer, p_expected jsonb,
    p_settings text[] DEFAULT NULL
) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
BEGIN
    IF p_settings IS NULL THEN
        SELECT array_agg(ARRAY[e.key, e.value]) INTO p_settings FROM jsonb_each_text(p_expected) AS e (key, value);
    END IF;
    FOR i IN 1..coalesce(array_length(p_settings, 1), 0) LOOP
        IF current_setting(p_settings[i][1], true) IS DISTINCT FROM p_settings[i][2] THEN
            PERFORM aioqueue.check_transaction(p_settings);
        END IF;
    END LOOP;
    PERFORM FROM aioqueue.live l
      WHERE l.lane = p_lane AND l.vt = p_vt AND l.job_id = p_job_id AND l.worker = p_worker AND l.attempt = p_attempt
        FOR KEY SHARE;
    IF NOT FOUND THEN
        RAISE EXCEPTION USING ERRCODE = 'AQ002', MESSAGE = 'job ' || p_job_id || ' is no longer owned by worker ' || p_worker;
    END IF;
END $$;
