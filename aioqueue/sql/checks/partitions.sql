-- partitions: relations that hold rows of a tenant table (its partitions, what it is a partition of, inheritance), which a role
-- may use directly, and where no policy reads the tenant setting: row-level security is off there, or another permissive policy
-- lets the role in. Only the policies of the relation that a statement names are applied. Changes nothing. Reads pg_class by oid.
SELECT pg_catalog.format('%%I.%%I', n.nspname, c.relname) AS "table", r.rolname::text AS role, pg_catalog.quote_ident(r.rolname) AS who,
       p.name AS parent
  FROM pg_catalog.pg_class c
  JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 CROSS JOIN pg_catalog.pg_roles r
  LEFT JOIN LATERAL (
       SELECT pg_catalog.format('%%I.%%I', pn.nspname, pc.relname) AS name
         FROM pg_catalog.pg_inherits i JOIN pg_catalog.pg_class pc ON pc.oid = i.inhparent
         JOIN pg_catalog.pg_namespace pn ON pn.oid = pc.relnamespace
        WHERE i.inhrelid = c.oid ORDER BY i.inhseqno LIMIT 1) p ON true
 WHERE c.oid = ANY (%(related)s::oid[]) AND NOT c.oid = ANY (%(tables)s::oid[])
   AND r.rolname = ANY (%(roles)s::name[]) AND NOT r.rolsuper
   AND pg_catalog.has_schema_privilege(r.oid, n.oid, 'USAGE')
   AND (pg_catalog.has_table_privilege(r.oid, c.oid, 'SELECT, INSERT, UPDATE, DELETE, TRUNCATE')
        OR pg_catalog.has_any_column_privilege(r.oid, c.oid, 'SELECT, INSERT, UPDATE'))
   AND (NOT c.relrowsecurity
        OR EXISTS (SELECT FROM pg_catalog.pg_policy x, unnest(x.polroles) AS who (oid)
                    WHERE x.polrelid = c.oid AND x.polpermissive AND (who.oid = 0 OR pg_catalog.pg_has_role(r.oid, who.oid, 'USAGE'))))
 ORDER BY 1, 2
