-- limit_key: the 64-bit name of one limit: 'tenant' and its name, 'task' and its name, 'key' and the task's name; with
-- p_key, of one key of that task. From md5, which is stable for ever, as lanes are.
CREATE OR REPLACE FUNCTION aioqueue.limit_key(p_kind text, p_name text, p_key text DEFAULT NULL) RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT ('x' || pg_catalog.left(pg_catalog.md5(pg_catalog.convert_to(
        p_kind || ':' || pg_catalog.length(p_name) || ':' || p_name || coalesce(':' || p_key, ''), 'UTF8')), 16))::bit(64)::bigint
$$;
