-- check_transaction: raises SQLSTATE AQ003 unless this transaction is still the one that was opened for the job: the
-- same marker (a COMMIT or ROLLBACK drops it), tenant, role, and row security on. role is a setting that SECURITY DEFINER
-- does not change, so the caller's is seen here.
CREATE OR REPLACE FUNCTION aioqueue.check_transaction(p_marker text, p_setting text, p_tenant text) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
DECLARE what text;
BEGIN
    what := CASE
        WHEN pg_catalog.current_setting('aioqueue_job.marker', true) IS DISTINCT FROM p_marker
            THEN 'it ended the transaction that was opened for it (COMMIT or ROLLBACK in SQL)'
        WHEN pg_catalog.current_setting(p_setting, true) IS DISTINCT FROM p_tenant
            THEN 'it changed the setting ' || p_setting || ', which carries the tenant'
        WHEN pg_catalog.current_setting('role') IS DISTINCT FROM pg_catalog.current_setting('aioqueue_job.role', true)
            THEN 'it changed the role (SET ROLE)'
        WHEN pg_catalog.current_setting('row_security') <> 'on' THEN 'it switched row_security off' END;
    IF what IS NOT NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'AQ003', MESSAGE = 'the task broke its transaction: ' || what;
    END IF;
END $$;
