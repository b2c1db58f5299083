-- notify: a hint that there may be work ('ready'), that jobs have ended ('done') or have come further ('progress'); constant
-- size, never needed for correctness. In a transaction of its own, after the commit: a NOTIFY inside serialises commits of the whole server.
-- The channel carries the schema, hashed, as listen.py computes it.
CREATE OR REPLACE FUNCTION aioqueue.notify(p_kind text DEFAULT 'ready') RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF p_kind NOT IN ('ready', 'done', 'progress') THEN
        RAISE invalid_parameter_value USING MESSAGE = 'notify: expected ready, done or progress, got ' || p_kind;
    END IF;
    PERFORM pg_notify('aioqueue_' || left(md5('aioqueue.'), 16) || '_' || p_kind, '');
END $$;
