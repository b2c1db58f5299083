-- set_queue: pauses a queue or resumes it, in the caller's transaction: claims that begin after the commit leave its lanes out.
-- A wait_for_claims after the commit waits for those that began before. Jobs that run are left alone.
CREATE OR REPLACE FUNCTION aioqueue.set_queue(p_queue text, p_paused boolean) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF p_queue IS NULL OR btrim(p_queue) = '' OR length(p_queue) > 200 THEN
        RAISE invalid_parameter_value USING MESSAGE = 'queue: expected a name of 1 to 200 characters, got ' || coalesce(quote_literal(left(p_queue, 40)), 'NULL');
    END IF;
    IF p_paused THEN
        INSERT INTO aioqueue.queue AS q (name, paused) VALUES (p_queue, true) ON CONFLICT (name) DO UPDATE SET paused = true;
    ELSE
        DELETE FROM aioqueue.queue q WHERE q.name = p_queue;
    END IF;
END $$;
