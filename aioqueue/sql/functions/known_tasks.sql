-- known_tasks: the names of the tasks that workers have registered, so that an enqueue by name can refuse a slip of the pen.
CREATE OR REPLACE FUNCTION aioqueue.known_tasks() RETURNS SETOF text
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN QUERY SELECT t.name FROM aioqueue.task t ORDER BY t.name LIMIT 10000;
END $$;
