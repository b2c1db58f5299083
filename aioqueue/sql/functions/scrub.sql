-- scrub: takes from a connection whatever a job left on it, after its transaction has ended, before the next job has it.
-- Runs with the caller's own rights and settings. RESET ALL returns to what the connection was opened with. Returns how many
-- statements of the driver are still prepared: a job may have deallocated them without its knowing.
CREATE OR REPLACE FUNCTION aioqueue.scrub() RETURNS bigint
LANGUAGE plpgsql VOLATILE AS $$
DECLARE prepared text;
BEGIN
    SET SESSION AUTHORIZATION DEFAULT;
    RESET ALL;
    UNLISTEN *;
    PERFORM pg_catalog.pg_advisory_unlock_all();
    EXECUTE 'CLOSE ALL';  -- plpgsql has a CLOSE of its own
    -- Those of the driver stay: DISCARD ALL would break them.
    FOR prepared IN SELECT p.name FROM pg_catalog.pg_prepared_statements p WHERE p.from_sql LOOP
        EXECUTE pg_catalog.format('DEALLOCATE %I', prepared);
    END LOOP;
    DISCARD TEMP;
    DISCARD SEQUENCES;
    RETURN (SELECT pg_catalog.count(*) FROM pg_catalog.pg_prepared_statements p WHERE NOT p.from_sql);
END $$;
