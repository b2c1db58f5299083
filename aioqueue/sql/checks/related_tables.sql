-- related_tables: the tenant tables, what they are partitions of or inherit from, and all that is below any of these: every
-- relation by which a tenant table's rows can be reached. Changes nothing. Walks pg_inherits by its indexes, up, then down.
WITH RECURSIVE up (oid) AS (
    SELECT t FROM unnest(%(tables)s::oid[]) t
    UNION
    SELECT i.inhparent FROM up JOIN pg_catalog.pg_inherits i ON i.inhrelid = up.oid
), down (oid) AS (
    SELECT oid FROM up
    UNION
    SELECT i.inhrelid FROM down JOIN pg_catalog.pg_inherits i ON i.inhparent = down.oid
)
SELECT oid::bigint AS oid FROM down ORDER BY 1
