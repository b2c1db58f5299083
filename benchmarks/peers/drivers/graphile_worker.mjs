// graphile-worker with the settings of its own performance page: local queue, batched completion.
import { version, find, dsn, options, payload, load, ran, main } from "./protocol.mjs";

const { run, makeWorkerUtils, Logger } = await load("graphile-worker");
const { Pool } = find("pg");
const logger = new Logger(() => () => {});
const concurrency = options.concurrency ?? 24, size = options.size ?? 500, connections = options.pool ?? 10;
const worker = {
  connectionString: dsn, concurrentJobs: concurrency, maxPoolSize: connections, logger,
  ...(size > 0 ? { localQueue: { size }, completeJobBatchDelay: 0, failJobBatchDelay: 0 } : {}),
};
const pgPool = new Pool({ connectionString: dsn, max: connections });
pgPool.on("error", () => {});
pgPool.on("connect", (client) => client.on("error", () => {}));
let utils, runner;

await main({
  left: "SELECT EXISTS (SELECT FROM graphile_worker.jobs) AS left",
  async setup() {
    utils = await makeWorkerUtils({ pgPool, logger });
    await utils.migrate();
    const settings = `concurrentJobs=${concurrency}, localQueue.size=${size}, completeJobBatchDelay=0, failJobBatchDelay=0, pool ${connections}`;
    return { version: version("graphile-worker"), settings: `${settings}, node ${process.version}` };
  },
  async bulk(first, n) {
    for (let start = first; start < first + n; start += 10000) {
      const jobs = [];
      for (let i = start; i < Math.min(start + 10000, first + n); i++) jobs.push({ identifier: "send", payload: payload(i) });
      await utils.addJobs(jobs);
    }
  },
  async single(i) { await utils.addJob("send", payload(i)); },
  async start() {
    runner = await run({
      preset: { worker }, noHandleSignals: true,
      taskList: { async send(job) { if (job.n < 0) throw new Error(); ran(); } },
    });
  },
  async stop() { await runner.stop(); },
});
