-- bypass: roles for which no policy holds: a superuser, BYPASSRLS, or a member of such a role. Changes nothing. Reads pg_roles.
-- `through`: the role that it is a member of, where it has neither itself (attributes are not inherited, but SET ROLE gives them).
SELECT r.rolname::text AS role, r.rolsuper AS super, through.rolname::text AS through
  FROM pg_catalog.pg_roles r
  LEFT JOIN LATERAL (
       SELECT x.rolname FROM pg_catalog.pg_roles x
        WHERE (x.rolsuper OR x.rolbypassrls) AND NOT r.rolsuper AND NOT r.rolbypassrls
          AND pg_catalog.pg_has_role(r.oid, x.oid, 'MEMBER')
        ORDER BY x.rolsuper DESC, x.rolname LIMIT 1) through ON true
 WHERE r.rolname = ANY (%(roles)s::name[]) AND (r.rolsuper OR r.rolbypassrls OR through.rolname IS NOT NULL)
 ORDER BY 1
