-- vacuum: of each of the queue's tables: whether autovacuum is off for it, its dead and living rows by the server's statistics,
-- and since when it was not vacuumed; `server`: whether autovacuum runs at all. Changes nothing. By pg_class's index on the schema.
SELECT pg_catalog.format('%%I.%%I', n.nspname, c.relname) AS "table", s.n_dead_tup AS dead, s.n_live_tup AS living,
       extract(epoch FROM clock_timestamp() - greatest(s.last_vacuum, s.last_autovacuum))::double precision AS seconds,
       EXISTS (SELECT FROM pg_catalog.pg_options_to_table(c.reloptions) o
                WHERE o.option_name = 'autovacuum_enabled' AND NOT o.option_value::boolean) AS off,
       current_setting('autovacuum')::boolean AND current_setting('track_counts')::boolean AS server
  FROM pg_catalog.pg_namespace n
  JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid AND c.relkind = 'r'
  LEFT JOIN pg_catalog.pg_stat_all_tables s ON s.relid = c.oid
 WHERE n.nspname = %(schema)s::name
   AND (SELECT r.relname FROM pg_catalog.pg_class r WHERE r.oid = coalesce(pg_catalog.pg_partition_root(c.oid), c.oid)) = ANY (%(own)s::name[])
 ORDER BY 1
