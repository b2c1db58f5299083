-- check_transaction: raises SQLSTATE AQ003 unless every setting of p_expected (a jsonb object of texts) is what it says: the
-- marker (a COMMIT or ROLLBACK drops it), the tenant and what else policies go by, the role, the session's user, row security.
-- SECURITY DEFINER changes none of these, so the caller's are seen here. What is said is what the task did first, most likely.
CREATE OR REPLACE FUNCTION aioqueue.check_transaction(p_expected jsonb) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
DECLARE changed text[]; what text;
BEGIN
    SELECT pg_catalog.array_agg(e.key) INTO changed FROM pg_catalog.jsonb_each_text(p_expected) AS e (key, value)
     WHERE pg_catalog.current_setting(e.key, true) IS DISTINCT FROM e.value;
    IF changed IS NULL THEN
        RETURN;
    END IF;
    what := CASE
        WHEN 'aioqueue_job.marker' = ANY (changed)
            THEN 'it ended the transaction that was opened for it (COMMIT or ROLLBACK in SQL)'
        WHEN 'session_authorization' = ANY (changed) THEN 'it changed the session''s user (SET SESSION AUTHORIZATION)'
        WHEN 'role' = ANY (changed) OR 'aioqueue_job.role' = ANY (changed) THEN 'it changed the role (SET ROLE)'
        WHEN 'row_security' = ANY (changed) THEN 'it switched row_security off'
        ELSE 'it changed the setting ' || changed[1] || ', which policies go by' END;
    RAISE EXCEPTION USING ERRCODE = 'AQ003', MESSAGE = 'the task broke its transaction: ' || what;
END $$;
