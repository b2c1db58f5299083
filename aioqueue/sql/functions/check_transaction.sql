-- check_transaction: raises SQLSTATE AQ003 unless every setting of p_settings ({{name, value}, …}) is what it says: the marker
-- (a COMMIT or ROLLBACK drops it), the tenant and what else policies go by, the role, the session's user, row security.
-- SECURITY DEFINER changes none of these, so the caller's are seen here. What is said is what the task did first, most likely.
-- Called by finish and confirm when one is not. A loop: as an expression of plpgsql it needs no executor.
CREATE OR REPLACE FUNCTION aioqueue.check_transaction(p_settings text[]) RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $$
DECLARE changed text[]; what text;
BEGIN
    FOR i IN 1..coalesce(pg_catalog.array_length(p_settings, 1), 0) LOOP
        IF pg_catalog.current_setting(p_settings[i][1], true) IS DISTINCT FROM p_settings[i][2] THEN
            changed := pg_catalog.array_append(changed, p_settings[i][1]);
        END IF;
    END LOOP;
    IF changed IS NULL THEN
        RETURN true;
    END IF;
    what := CASE
        WHEN 'aioqueue_job.marker' = ANY (changed)
            THEN 'it ended the transaction that was opened for it (COMMIT or ROLLBACK in SQL, PREPARE TRANSACTION), or took back '
                 'its settings (RESET ALL); what may have to be undone alone goes into a savepoint'
        WHEN 'session_authorization' = ANY (changed) THEN 'it changed the session''s user (SET SESSION AUTHORIZATION)'
        WHEN 'role' = ANY (changed) OR 'aioqueue_job.role' = ANY (changed) THEN 'it changed the role (SET ROLE)'
        WHEN 'row_security' = ANY (changed) THEN 'it switched row_security off'
        ELSE 'it changed the setting ' || changed[1] || ', which policies go by; work for another tenant goes into a block of tenant(…)' END;
    RAISE EXCEPTION USING ERRCODE = 'AQ003', MESSAGE = 'the task broke its transaction: ' || what;
END $$;
