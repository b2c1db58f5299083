-- list_tenants: the tenants that have a weight, a limit or a pause of their own, with the jobs that run under the limit and those
-- that wait for it (each up to `cap`; running NULL without a limit, where nothing counts them). Changes nothing. Served by the
-- primary keys of held and parked. No row: every tenant has weight 1 and no limit.
SELECT n.name AS tenant, coalesce(t.weight, 1) AS weight, l.max_running, coalesce(l.paused, false) AS paused,
       CASE WHEN l.key IS NOT NULL THEN (SELECT count(*)::integer FROM (SELECT FROM aioqueue.held h WHERE h.key = l.key LIMIT %(cap)s::integer) h) END AS running,
       (SELECT count(*)::integer FROM (SELECT FROM aioqueue.parked p WHERE p.key = l.key LIMIT %(cap)s::integer) p) AS parked
  FROM (SELECT x.name FROM aioqueue.tenant x UNION SELECT x.name FROM aioqueue.limits x WHERE x.kind = 'tenant') n
  LEFT JOIN aioqueue.tenant t ON t.name = n.name
  LEFT JOIN aioqueue.limits l ON l.kind = 'tenant' AND l.name = n.name
 ORDER BY n.name LIMIT %(limit)s::integer
