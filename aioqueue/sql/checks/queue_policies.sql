-- queue_policies: policies on the queue's own tables or their partitions, and row-level security that is on there without one
-- (policy NULL). Changes nothing. One pass over the schema's relations, by pg_class's index. No row: all is well.
SELECT c.relname::text AS "table", pg_catalog.format('%%I.%%I', n.nspname, c.relname) AS name, p.polname::text AS policy,
       pg_catalog.quote_ident(p.polname) AS quoted, c.relrowsecurity AS enabled, c.relforcerowsecurity AS forced
  FROM pg_catalog.pg_namespace n
  JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid AND c.relkind IN ('r', 'p')
  LEFT JOIN pg_catalog.pg_policy p ON p.polrelid = c.oid
 WHERE n.nspname = %(schema)s::name AND (p.oid IS NOT NULL OR c.relrowsecurity)
   AND (SELECT r.relname FROM pg_catalog.pg_class r WHERE r.oid = coalesce(pg_catalog.pg_partition_root(c.oid), c.oid)) = ANY (%(own)s::name[])
 ORDER BY 1, 3
