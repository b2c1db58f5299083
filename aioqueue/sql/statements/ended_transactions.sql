-- ended_transactions: which of these transactions (xid8, in decimal) have ended, by commit or by rollback. Changes nothing.
-- A snapshot answers without the commit log, so that one of another server, or too old for the log, is no error.
-- No row for one that is still open, or has not begun.
SELECT u.xid::text
  FROM unnest(%s::text::xid8[]) AS u (xid)
 WHERE pg_catalog.pg_visible_in_snapshot(u.xid, pg_catalog.pg_current_snapshot());
