-- scrub: takes from a connection whatever a job left on it, after its transaction has ended, before the next job has it.
-- Runs with the caller's own rights and settings. RESET ALL returns to what the connection was opened with. Returns how many
-- statements of the driver are still prepared: a job may have deallocated them without its knowing.
CREATE OR REPLACE FUNCTION aioqueue.scrub() RETURNS bigint
LANGUAGE plpgsql VOLATILE AS $$
DECLARE unlocked boolean; left_behind boolean; kept bigint; name text;
BEGIN
    SET SESSION AUTHORIZATION DEFAULT;
    RESET ALL;
    UNLISTEN *;
    unlocked := pg_catalog.pg_advisory_unlock_all() IS NULL;  -- an expression: a query would cost an executor
    EXECUTE 'CLOSE ALL';  -- plpgsql has a CLOSE of its own
    -- Those of the driver stay: DISCARD ALL would break them.
    SELECT pg_catalog.bool_or(p.from_sql), pg_catalog.count(*) FILTER (WHERE NOT p.from_sql)
      INTO left_behind, kept FROM pg_catalog.pg_prepared_statement() p;
    IF left_behind THEN
        FOR name IN SELECT p.name FROM pg_catalog.pg_prepared_statement() p WHERE p.from_sql LOOP
            EXECUTE pg_catalog.format('DEALLOCATE %I', name);
        END LOOP;
    END IF;
    DISCARD TEMP;
    DISCARD SEQUENCES;
    RETURN kept;
END $$;
