-- worker_roles: the roles whose rights count, those that run jobs. Changes nothing. Reads pg_roles and one function's ACL.
-- taken: the role that jobs' transactions take on, where it is known. mine: a worker asks, for its own session.
-- Otherwise an administrator (a superuser, the owner) asks for the roles that were granted a worker's rights and can log in,
-- whoever else asks for itself; and where nobody was granted anything, the session's own role is what workers run as.
WITH claim AS (
    SELECT p.proowner, p.proacl
      FROM pg_catalog.pg_proc p JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace
     WHERE n.nspname = %(schema)s::name AND p.proname = 'claim'
), granted AS (
    SELECT r.rolname
      FROM claim c, pg_catalog.pg_roles r
     WHERE r.rolcanlogin AND r.oid <> c.proowner
       AND EXISTS (SELECT FROM pg_catalog.aclexplode(c.proacl) a
                    WHERE a.grantee NOT IN (0, c.proowner)
                      AND CASE WHEN r.rolsuper THEN a.grantee = r.oid ELSE pg_catalog.pg_has_role(r.oid, a.grantee, 'MEMBER') END)
       AND EXISTS (SELECT FROM pg_catalog.pg_roles me
                    WHERE me.rolname = current_user AND (me.rolsuper OR pg_catalog.pg_has_role(me.oid, c.proowner, 'MEMBER')))
       AND NOT %(mine)s::boolean
)
SELECT t.rolname::text AS role FROM pg_catalog.pg_roles t WHERE t.rolname = %(taken)s::name
UNION ALL
SELECT g.rolname::text FROM granted g WHERE %(taken)s::name IS NULL
UNION ALL
SELECT current_user::text WHERE %(taken)s::name IS NULL AND NOT EXISTS (SELECT FROM granted)
ORDER BY 1
