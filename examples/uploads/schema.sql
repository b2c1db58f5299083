-- The application's own table, which row-level security keeps apart by tenant. Run as the owner, for workers of role aioqueue_worker.
DROP SCHEMA IF EXISTS uploads CASCADE;
CREATE SCHEMA uploads;
CREATE TABLE uploads.upload (
    id         uuid PRIMARY KEY,
    tenant     text NOT NULL DEFAULT current_setting('app.tenant'),
    name       text NOT NULL,
    job        uuid NOT NULL,
    pages      int,                        -- of the PDF, once it is there
    created_at timestamptz NOT NULL DEFAULT now()
);
ALTER TABLE uploads.upload ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY;
CREATE POLICY own ON uploads.upload USING (tenant = nullif(current_setting('app.tenant', true), ''));
GRANT USAGE ON SCHEMA uploads TO aioqueue_worker;
GRANT SELECT, INSERT, UPDATE ON uploads.upload TO aioqueue_worker;
