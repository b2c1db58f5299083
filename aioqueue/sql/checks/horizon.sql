-- horizon: whoever keeps VACUUM from removing dead rows of this database: sessions by coalesce(backend_xmin, backend_xid), prepared
-- transactions, slots, and standbys that say what they read. `back`: transactions since. Changes nothing. Not those that hold
-- nothing (BEGIN alone, a READ COMMITTED reader gone idle, another database), nor a VACUUM, nor this session, nor a statement
-- of less than 0.1 s, nor an autovacuum's ANALYZE of less than a minute. `state` and `seconds` are NULL where the role may not see
-- them (no pg_read_all_stats).
SELECT 'session' AS kind, a.pid::text AS name, a.usename::text AS who, a.application_name AS application, host(a.client_addr) AS address,
       a.state, extract(epoch FROM clock_timestamp() - a.xact_start)::double precision AS seconds,
       age(coalesce(a.backend_xmin, a.backend_xid)) AS back
  FROM pg_catalog.pg_stat_activity a
  JOIN pg_catalog.pg_database d ON d.oid = a.datid AND d.datname = current_database()
 WHERE coalesce(a.backend_xmin, a.backend_xid) IS NOT NULL AND a.pid <> pg_backend_pid() AND a.leader_pid IS NULL
   AND NOT EXISTS (SELECT FROM pg_catalog.pg_stat_progress_vacuum v WHERE v.pid = a.pid)
   AND NOT coalesce(a.state = 'active' AND a.query_start > clock_timestamp() - interval '0.1 s', false)
   AND (a.usesysid IS NOT NULL OR a.xact_start < clock_timestamp() - interval '1 min')
UNION ALL
SELECT 'prepared', p.gid, p.owner::text, NULL, NULL, NULL, extract(epoch FROM clock_timestamp() - p.prepared)::double precision, age(p.transaction)
  FROM pg_catalog.pg_prepared_xacts p WHERE p.database = current_database()
UNION ALL
SELECT 'slot', s.slot_name::text, s.slot_type, NULL, NULL, CASE WHEN s.active THEN 'active' ELSE 'inactive' END, NULL, age(s.xmin)
  FROM pg_catalog.pg_replication_slots s WHERE s.xmin IS NOT NULL
UNION ALL
SELECT 'standby', a.pid::text, a.usename::text, a.application_name, host(a.client_addr), NULL,
       extract(epoch FROM clock_timestamp() - a.backend_start)::double precision, age(a.backend_xmin)
  FROM pg_catalog.pg_stat_activity a JOIN pg_catalog.pg_stat_replication r ON r.pid = a.pid
 WHERE a.datid IS NULL AND a.backend_xmin IS NOT NULL
 ORDER BY back DESC, seconds DESC NULLS LAST, kind, name
