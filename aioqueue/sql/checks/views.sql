-- views: views and materialized views over tenant tables, through any number of other views, which a role may use and which read
-- the tables as somebody else: the owner of the innermost view without security_invoker. `open`: no policy holds for that owner
-- there, so every tenant's rows are seen. Changes nothing. Walks pg_depend by its index on what is referred to.
WITH RECURSIVE reads (oid, kind, seen, reader) AS (
    SELECT t, 'r'::"char", t, NULL::oid FROM unnest(%(related)s::oid[]) t
    UNION
    SELECT v.oid, v.relkind, b.seen, coalesce(b.reader, CASE WHEN NOT invoker.is_set THEN v.relowner END)
      FROM reads b
      JOIN pg_catalog.pg_depend d ON d.refclassid = 'pg_catalog.pg_class'::regclass AND d.refobjid = b.oid
                                 AND d.classid = 'pg_catalog.pg_rewrite'::regclass
      JOIN pg_catalog.pg_rewrite w ON w.oid = d.objid AND w.ev_class <> b.oid
      JOIN pg_catalog.pg_class v ON v.oid = w.ev_class AND v.relkind IN ('v', 'm')
     CROSS JOIN LATERAL (SELECT EXISTS (SELECT FROM pg_catalog.pg_options_to_table(v.reloptions) o
                                         WHERE o.option_name = 'security_invoker' AND o.option_value::boolean) AS is_set) invoker
)
SELECT pg_catalog.format('%%I.%%I', n.nspname, v.relname) AS view, v.relkind = 'm' AS materialized, r.rolname::text AS role,
       pg_catalog.quote_ident(r.rolname) AS who, o.rolname::text AS owner, bool_or(open.is_so) AS open,
       min(pg_catalog.format('%%I.%%I', tn.nspname, t.relname)) FILTER (WHERE open.is_so) AS opened,
       min(pg_catalog.format('%%I.%%I', tn.nspname, t.relname)) AS "table"
  FROM reads b
  JOIN pg_catalog.pg_class v ON v.oid = b.oid AND v.relkind IN ('v', 'm')
  JOIN pg_catalog.pg_namespace n ON n.oid = v.relnamespace
  JOIN pg_catalog.pg_roles o ON o.oid = b.reader
  JOIN pg_catalog.pg_class t ON t.oid = b.seen
  JOIN pg_catalog.pg_namespace tn ON tn.oid = t.relnamespace
 CROSS JOIN pg_catalog.pg_roles r
 CROSS JOIN LATERAL (
       SELECT o.rolsuper OR o.rolbypassrls OR NOT t.relrowsecurity
              OR NOT t.relforcerowsecurity AND pg_catalog.pg_has_role(o.oid, t.relowner, 'USAGE') AS is_so) open
 WHERE r.rolname = ANY (%(roles)s::name[]) AND NOT r.rolsuper
   AND NOT EXISTS (SELECT FROM pg_catalog.pg_options_to_table(v.reloptions) x
                    WHERE x.option_name = 'security_invoker' AND x.option_value::boolean)
   AND pg_catalog.has_schema_privilege(r.oid, n.oid, 'USAGE')
   AND (pg_catalog.has_table_privilege(r.oid, v.oid, 'SELECT, INSERT, UPDATE, DELETE')
        OR pg_catalog.has_any_column_privilege(r.oid, v.oid, 'SELECT, INSERT, UPDATE'))
 GROUP BY n.nspname, v.relname, v.relkind, r.rolname, o.rolname
 ORDER BY 1, 3
