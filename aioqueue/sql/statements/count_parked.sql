-- count_parked: ready jobs that wait for a limit, by limit: its kind ('tenant', 'task', 'key'), its name (of a key: the task's),
-- the key, the limit, how many run under it (up to `cap`). Changes nothing. Looks at the first `cap` rows of parked, along its
-- primary key; a count of `cap` in all means: that many or more. No row: none waits.
SELECT coalesce(l.kind, 'none') AS kind, coalesce(l.name, nullif(f.tenant, '')) AS name, CASE WHEN l.kind = 'key' THEN f.job_key END AS key,
       l.max_running, coalesce(l.paused, false) AS paused, g.jobs,
       (SELECT count(*)::integer FROM (SELECT FROM aioqueue.held h WHERE h.key = g.key LIMIT %(cap)s::integer) h) AS running
  FROM (SELECT x.key, count(*)::integer AS jobs, min(x.pos) AS first
          FROM (SELECT p.key, p.pos FROM aioqueue.parked p ORDER BY p.key, p.pos LIMIT %(cap)s::integer) x GROUP BY x.key) g,
       LATERAL (SELECT p.rule, p.tenant, (SELECT j.key FROM aioqueue.job j WHERE j.id = p.job_id) AS job_key
                  FROM aioqueue.parked p WHERE p.key = g.key AND p.pos = g.first) f
  LEFT JOIN aioqueue.limits l ON l.key = f.rule
 ORDER BY g.jobs DESC, kind, name, key
