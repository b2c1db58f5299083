-- extra_policies: permissive policies on tenant tables that do not read the tenant setting and hold for a role: permissive ones
-- are joined by OR, so each opens the table to what it allows. Not those that allow nothing, nor those that a restrictive policy
-- by the setting narrows for the same commands. Changes nothing. One pass over pg_policy, for the few others by its indexes.
WITH extra AS MATERIALIZED (
    SELECT p.polrelid, p.polname, p.polcmd, p.polroles,
           pg_catalog.pg_get_expr(p.polqual, p.polrelid) AS qual, pg_catalog.pg_get_expr(p.polwithcheck, p.polrelid) AS checked
      FROM pg_catalog.pg_policy p
      JOIN unnest(%(tables)s::oid[]) t ON t = p.polrelid
      LEFT JOIN unnest(%(policies)s::oid[]) own ON own = p.oid
     WHERE own IS NULL AND p.polpermissive
)
SELECT pg_catalog.format('%%I.%%I', n.nspname, c.relname) AS "table", pg_catalog.quote_ident(p.polname) AS policy, r.rolname::text AS role,
       CASE p.polcmd WHEN 'r' THEN 'SELECT' WHEN 'a' THEN 'INSERT' WHEN 'w' THEN 'UPDATE' WHEN 'd' THEN 'DELETE' ELSE 'ALL' END AS command,
       coalesce(p.qual, p.checked) AS allows
  FROM extra p
  JOIN pg_catalog.pg_class c ON c.oid = p.polrelid AND c.relrowsecurity
  JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 CROSS JOIN pg_catalog.pg_roles r
 WHERE r.rolname = ANY (%(roles)s::name[]) AND NOT r.rolsuper
   AND EXISTS (SELECT FROM unnest(p.polroles) AS who (oid) WHERE who.oid = 0 OR pg_catalog.pg_has_role(r.oid, who.oid, 'USAGE'))
   AND (coalesce(p.qual, 'false') <> 'false' OR coalesce(p.checked, 'false') <> 'false')
   AND NOT EXISTS (
       SELECT FROM LATERAL (SELECT * FROM pg_catalog.pg_policy y WHERE y.polrelid = p.polrelid OFFSET 0) x
        WHERE NOT x.polpermissive AND x.oid = ANY (%(policies)s::oid[]) AND x.polcmd IN ('*', p.polcmd)
          AND EXISTS (SELECT FROM unnest(x.polroles) AS who (oid) WHERE who.oid = 0 OR pg_catalog.pg_has_role(r.oid, who.oid, 'USAGE')))
 ORDER BY 1, 2, 3
