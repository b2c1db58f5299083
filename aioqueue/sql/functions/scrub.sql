-- scrub: takes from a connection whatever a job left on it, after its transaction has ended, before the next job has it.
-- Runs with the caller's own rights and settings. RESET ALL returns to what the connection was opened with. Returns how many
-- statements of the driver are still prepared: a job may have deallocated them without its knowing.
CREATE OR REPLACE FUNCTION aioqueue.scrub() RETURNS bigint
LANGUAGE plpgsql VOLATILE AS $$
DECLARE prepared text[]; kept bigint;
BEGIN
    SET SESSION AUTHORIZATION DEFAULT;
    RESET ALL;
    UNLISTEN *;
    PERFORM pg_catalog.pg_advisory_unlock_all();
    EXECUTE 'CLOSE ALL';  -- plpgsql has a CLOSE of its own
    -- Those of the driver stay: DISCARD ALL would break them.
    SELECT pg_catalog.array_agg(p.name) FILTER (WHERE p.from_sql), pg_catalog.count(*) FILTER (WHERE NOT p.from_sql)
      INTO prepared, kept FROM pg_catalog.pg_prepared_statements p;
    FOR i IN 1..coalesce(pg_catalog.cardinality(prepared), 0) LOOP
        EXECUTE pg_catalog.format('DEALLOCATE %I', prepared[i]);
    END LOOP;
    DISCARD TEMP;
    DISCARD SEQUENCES;
    RETURN kept;
END $$;
