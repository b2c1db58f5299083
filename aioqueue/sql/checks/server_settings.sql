-- server_settings: settings of the server, as this role's sessions get them, that hurt a queue. Changes nothing.
SELECT s.setting::bigint AS idle_in_transaction
  FROM pg_catalog.pg_settings s WHERE s.name = 'idle_in_transaction_session_timeout'
