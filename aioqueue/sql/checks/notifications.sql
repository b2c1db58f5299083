-- notifications: how full the server's queue of notifications is, 0 to 1. Changes nothing.
SELECT pg_catalog.pg_notification_queue_usage() AS used
