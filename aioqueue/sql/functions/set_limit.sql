-- set_limit: writes one limit, or takes it away where it neither limits nor pauses. Returns whether that changed anything.
-- Locks its row. Whoever sets it calls wait_for_claims, settle_limits and sweep_parked after the commit; workers do too, within seconds.
CREATE OR REPLACE FUNCTION aioqueue.set_limit(p_kind text, p_name text, p_max_running integer, p_paused boolean) RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    IF p_max_running IS NULL AND NOT p_paused THEN
        DELETE FROM aioqueue.limits l WHERE l.kind = p_kind AND l.name = p_name;
        RETURN FOUND;
    END IF;
    INSERT INTO aioqueue.limits AS l (key, kind, name, max_running, paused)
    VALUES (aioqueue.limit_key(p_kind, p_name), p_kind, p_name, p_max_running, p_paused)
    ON CONFLICT (key) DO UPDATE SET max_running = excluded.max_running, paused = excluded.paused, settled = false
       WHERE (l.max_running, l.paused) IS DISTINCT FROM (excluded.max_running, excluded.paused);
    RETURN FOUND;
END $$;
