-- scrub: takes from a connection whatever a job left on it, after its transaction has ended, before the next job has it.
-- Runs with the caller's own rights and settings. RESET ALL returns to what the connection was opened with.
CREATE OR REPLACE FUNCTION aioqueue.scrub() RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    SET SESSION AUTHORIZATION DEFAULT;
    RESET ALL;
    UNLISTEN *;
    PERFORM pg_catalog.pg_advisory_unlock_all();
    EXECUTE 'CLOSE ALL';  -- plpgsql has a CLOSE of its own
    DISCARD TEMP;
    DISCARD SEQUENCES;
END $$;
