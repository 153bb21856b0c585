//! The data pool: behind `sinew serve --pool`, asked by `sinew pool`, drawn from by `sinew train`.

use crate::failure::Failure;
use crate::recipe::Recipe;
use crate::run_dir::RunDir;
use crate::{output, recipe};
use bytes::Bytes;
use clap::{Args, Subcommand};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sinew_algo::{Advantage, Algorithm};
use sinew_gateway::{Mount, MountRequest, MountResponse};
use sinew_pool::http::{self, Request};
use sinew_pool::schema::Kind;
use sinew_pool::{Entry, Folder, PassedOver, Pool, PoolConfig, Scorer};
use sinew_render::Renderer;
use sinew_types::{EpisodeId, PolicyVersion, Trace, mix_seed};
use std::collections::BTreeSet;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Most bytes of an answer of the pool.
const MAX_ANSWER_BYTES: u64 = 1 << 30;

/// Time for a connection, and for an answer.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
const ANSWER_TIMEOUT: Duration = Duration::from_secs(120);

/// Attempts at a request that may be repeated.
const ATTEMPTS: u32 = 4;

/// Between two questions whether groups are ready.
const POLL: Duration = Duration::from_millis(500);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PoolFile {
    pool: PoolConfig,
}

/// The pool as paths of the gateway.
#[derive(Debug)]
struct PoolMount(Pool);

impl Mount for PoolMount {
    fn methods(&self, path: &str) -> Option<&'static [&'static str]> {
        http::methods(path)
    }

    fn max_body_bytes(&self) -> usize {
        self.0.config().max_body_bytes
    }

    fn answer(&self, request: MountRequest) -> MountResponse {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let asked = Request {
            method: &request.method,
            path: &request.path,
            query: &request.query,
            content_type: &request.content_type,
            body: Vec::from(request.body),
        };
        let told = http::answer(&self.0, asked, now.map_or(0.0, |d| d.as_secs_f64()));
        MountResponse {
            status: told.status,
            content_type: told.content_type,
            body: told.body,
        }
    }
}

/// The pool that a file configures; without a folder it is kept in memory.
pub(crate) fn mount(
    file: &Path,
    store: Option<&Path>,
    accept_loss: bool,
    renderer: Arc<dyn Renderer>,
    scorer: Scorer,
) -> Result<Arc<dyn Mount>, Failure> {
    let refused =
        |e: &dyn std::fmt::Display| Failure::input(format!("--pool {}: {e}", file.display()));
    let text = std::fs::read_to_string(file).map_err(|e| refused(&e))?;
    let read: PoolFile = toml::from_str(&text).map_err(|e| refused(&recipe::explain(&text, &e)))?;
    read.pool.check().map_err(|e| refused(&e))?;
    let folder = store.map(|s| s.join("pool"));
    let folder = folder.as_deref().map(|path| Folder { path, accept_loss });
    let pool = Pool::open(folder, read.pool, renderer, Some(scorer));
    Ok(Arc::new(PoolMount(pool.map_err(|e| refused(&e))?)))
}

/// A pool over HTTP.
#[derive(Clone, Debug)]
struct Client {
    agent: ureq::Agent,
    url: String,
    token: String,
}

impl Client {
    fn new(url: &str, token_file: &Path) -> Result<Self, Failure> {
        if !(url.starts_with("http://") || url.starts_with("https://")) {
            return Err(Failure::input(format!(
                "the pool's address {url:?}: allowed: one that begins with http:// or https://"
            )));
        }
        let token = std::fs::read_to_string(token_file).map_err(|e| {
            Failure::input(format!(
                "token file {}: {e}\n  hint: the file that `sinew serve` got as --control-token-file",
                token_file.display()
            ))
        })?;
        let agent = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .timeout_connect(Some(CONNECT_TIMEOUT))
            .timeout_recv_response(Some(ANSWER_TIMEOUT))
            .timeout_recv_body(Some(ANSWER_TIMEOUT))
            .build()
            .new_agent();
        Ok(Self {
            agent,
            url: url.trim_end_matches('/').to_owned(),
            token: token.trim().to_owned(),
        })
    }

    fn once(&self, method: &str, path: &str, body: &Value) -> Result<(u16, Value), String> {
        let url = format!("{}{path}", self.url);
        let key = format!("Bearer {}", self.token);
        let sent = match method {
            "GET" => self.agent.get(&url).header("authorization", &key).call(),
            "DELETE" => self.agent.delete(&url).header("authorization", &key).call(),
            _ => self
                .agent
                .post(&url)
                .header("authorization", &key)
                .header("content-type", "application/json")
                .send(body.to_string()),
        };
        let mut response = sent.map_err(|e| e.to_string())?;
        let status = response.status().as_u16();
        let read = response.body_mut().with_config().limit(MAX_ANSWER_BYTES);
        let text = read.read_to_vec().map_err(|e| e.to_string())?;
        let value = serde_json::from_slice(&text).map_err(|e| format!("no JSON: {e}"))?;
        Ok((status, value))
    }

    /// What the pool answers; what never arrived is asked again.
    fn call(&self, method: &str, path: &str, body: &Value) -> Result<Value, Failure> {
        let mut pause = Duration::from_millis(200);
        for attempt in 1.. {
            let problem = match self.once(method, path, body) {
                Ok((status, value)) if status < 300 => return Ok(value),
                Ok((status, value)) if status < 500 && status != 429 => {
                    let message = value["error"]["message"].as_str().unwrap_or_default();
                    let text = format!("{method} {}{path}: {status}: {message}", self.url);
                    return Err(Failure::input(text));
                }
                Ok((status, value)) => format!("{status}: {value}"),
                Err(e) => e,
            };
            if attempt == ATTEMPTS {
                return Err(Failure::system(format!(
                    "{method} {}{path}: {problem}\n  hint: is `sinew serve --pool` running there?",
                    self.url
                )));
            }
            std::thread::sleep(pause);
            pause *= 2;
        }
        unreachable!("the last attempt returns")
    }
}

/// What a recipe's algorithm draws from a pool.
pub(crate) fn kind_of(recipe: &Recipe) -> Kind {
    let composition = recipe.algorithm.composition(recipe.rollout.group_size);
    match composition.map(|c| c.advantage) {
        Ok(Advantage::One) => Kind::Sft,
        Ok(Advantage::Preference { .. }) => Kind::Dpo,
        _ => Kind::Rl,
    }
}

/// Why an algorithm cannot train on a group, whatever else is in the batch; `None`: it can.
pub(crate) fn unusable(algorithm: &Algorithm, group: &[Trace]) -> Option<String> {
    if let Err(e) = algorithm.spent(&[group.to_vec()]) {
        return Some(e.to_string());
    }
    let by_state = matches!(algorithm.composition().advantage, Advantage::Gigpo { .. });
    let mut nodes = group.iter().flat_map(|t| &t.nodes);
    let without = by_state && nodes.all(|n| n.state_hash.is_none());
    without.then(|| "it compares states, but no turn has a state_hash".to_owned())
}

/// A recipe's pool, if it answers and has the tokenizer of the model, and what it says of itself.
fn reached(recipe: &Recipe) -> Result<(Client, Value), Failure> {
    let Some(recipe::DataSection::Pool {
        url, token_file, ..
    }) = &recipe.data
    else {
        return Err(Failure::system("data.type is not `pool`"));
    };
    let client = Client::new(url, Path::new(token_file))?;
    let told = client.call("GET", "/pool", &Value::Null)?;
    let own = sinew_pool::tokenizer_hash(crate::wire::renderer(recipe)?.as_ref());
    if told["tokenizer"] != own.as_str() {
        return Err(Failure::input(format!(
            "data.url = {url:?}: its tokenizer is {}, this model's is {own}\n  \
             hint: serve the pool with the same --model",
            told["tokenizer"]
        )));
    }
    Ok((client, told))
}

/// Whether a recipe's pool can be drawn from, in words.
pub(crate) fn check(recipe: &Recipe) -> Result<String, Failure> {
    let (_, told) = reached(recipe)?;
    Ok(format!(
        "pool: {} whole groups wait",
        told["groups"]["whole"]
    ))
}

/// Least trajectories of a group that a recipe's algorithm compares.
fn min_group(recipe: &Recipe) -> usize {
    let composition = recipe.algorithm.composition(recipe.rollout.group_size);
    let compares = composition.is_ok_and(|c| c.advantage.compares());
    if compares { 2 } else { 1 }
}

/// Rows that a step was given, written down before they are stored and acknowledged.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Taken {
    step: u64,
    leases: Vec<(u64, Vec<String>)>,
}

/// Where a run draws its trajectories.
#[derive(Debug)]
pub(crate) struct PoolSource {
    client: Client,
    pub(crate) kind: Kind,
    consumer: String,
    wait: Duration,
    lease_s: f64,
    taken: PathBuf,
    /// Least trajectories of a group that the algorithm can use.
    min_group: usize,
    /// What the last answer said of groups that wait there for somebody else.
    passed_over: Mutex<PassedOver>,
}

/// What a step asks a pool for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted<'a> {
    pub(crate) step: u64,
    pub(crate) groups: usize,
    pub(crate) seed: u64,
    pub(crate) version: PolicyVersion,
    pub(crate) max_path_tokens: usize,
    pub(crate) algorithm: &'a Algorithm,
}

/// A trajectory's id in the run's own store.
fn own_id(id: &str) -> EpisodeId {
    EpisodeId::new(format!("pool-{id}"))
}

impl PoolSource {
    /// The pool of `[data] type = "pool"`; `None` with other data.
    pub(crate) fn of(recipe: &Recipe, dir: &RunDir) -> Result<Option<Self>, Failure> {
        let Some(recipe::DataSection::Pool {
            wait_s, lease_s, ..
        }) = &recipe.data
        else {
            return Ok(None);
        };
        let (client, _) = reached(recipe)?;
        let folder = std::fs::canonicalize(dir.path()).map_err(Failure::system)?;
        let name = folder.file_name().unwrap_or_default().to_string_lossy();
        let hash = blake3::hash(folder.as_os_str().as_encoded_bytes());
        Ok(Some(Self {
            client,
            kind: kind_of(recipe),
            consumer: format!("{name:.64}-{}", &hash.to_hex()[..12]),
            wait: Duration::from_secs_f64(*wait_s),
            lease_s: *lease_s,
            taken: dir.path().join("pool.jsonl"),
            min_group: min_group(recipe),
            passed_over: Mutex::default(),
        }))
    }

    /// What `step` was given before a restart.
    fn taken(&self, step: u64) -> Result<Option<Taken>, Failure> {
        let text = match std::fs::read_to_string(&self.taken) {
            Ok(text) => text,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(Failure::system(format!("{}: {e}", self.taken.display()))),
        };
        // A line that a crash cut says nothing: what it speaks of was not stored.
        let mut lines = text
            .lines()
            .rev()
            .filter_map(|l| serde_json::from_str::<Taken>(l).ok());
        Ok(lines.find(|t| t.step == step))
    }

    fn note(&self, taken: &Taken) -> Result<(), Failure> {
        let failed = |e: std::io::Error| Failure::system(format!("{}: {e}", self.taken.display()));
        let mut file = std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(&self.taken)
            .map_err(failed)?;
        let line = serde_json::to_string(taken).map_err(Failure::system)?;
        // A cut line before it must not swallow this one.
        file.write_all(format!("\n{line}\n").as_bytes())
            .map_err(failed)?;
        file.sync_all().map_err(failed)
    }

    /// Up to `groups` groups of trajectories for a step: as many as come in time, none if the pool
    /// stays empty. `stop` ends the wait. What the algorithm cannot use goes to the pool's quarantine,
    /// with the reason. The others are the run's own once it has stored and acknowledged them.
    pub(crate) fn draw(
        &self,
        wanted: &Wanted<'_>,
        stop: impl Fn() -> bool,
    ) -> Result<Vec<Trace>, Failure> {
        let step = wanted.step;
        if let Some(before) = self.taken(step)? {
            // Given out, but never stored: back to the pool before anything is drawn.
            self.give_back(&before)?;
        }
        let mut taken = Taken {
            step,
            leases: Vec::new(),
        };
        let (mut traces, mut drawn) = (Vec::new(), 0);
        let begun = Instant::now();
        while drawn < wanted.groups {
            let (lease, given) = self.lease(wanted, drawn)?;
            let nothing = given.is_empty();
            let mut ids = Vec::new();
            for group in given {
                let names = group.iter().map(|t| t.episode.0.clone());
                let names: Vec<String> = names.collect();
                if let Some(reason) = unusable(wanted.algorithm, &group) {
                    self.reject(lease, &names, &reason)?;
                    continue;
                }
                drawn += 1;
                ids.extend(names);
                traces.extend(group);
            }
            if !ids.is_empty() {
                taken.leases.push((lease, ids));
            }
            if stop() {
                self.give_back(&taken)?;
                return Ok(Vec::new());
            }
            if nothing {
                if begun.elapsed() >= self.wait {
                    break;
                }
                std::thread::sleep(POLL.min(self.wait));
            }
        }
        if !traces.is_empty() {
            self.note(&taken)?;
        }
        let own = |t: Trace| Trace {
            episode: own_id(t.episode.as_str()),
            step,
            purpose: "train".into(),
            ..t
        };
        Ok(traces.into_iter().map(own).collect())
    }

    /// A lease on groups that are missing, and what it gives; 0 and nothing if none is ready.
    fn lease(&self, wanted: &Wanted<'_>, drawn: usize) -> Result<(u64, Vec<Vec<Trace>>), Failure> {
        let step = wanted.step.wrapping_mul(65_537);
        let asked = json!({
            "consumer": self.consumer, "kind": self.kind, "groups": wanted.groups - drawn,
            "ttl_s": self.lease_s, "version": wanted.version,
            "max_path_tokens": wanted.max_path_tokens, "min_group": self.min_group,
            "seed": mix_seed(wanted.seed, step + drawn as u64),
        });
        let mut loan = self.client.call("POST", "/pool/lease", &asked)?;
        let given: Vec<Vec<Entry>> =
            serde_json::from_value(loan["groups"].take()).map_err(Failure::system)?;
        let passed: PassedOver =
            serde_json::from_value(loan["passed_over"].take()).map_err(Failure::system)?;
        if let Ok(mut told) = self.passed_over.lock() {
            *told = passed;
        }
        let groups = given.into_iter();
        let groups = groups.map(|g| g.into_iter().map(|e| e.trace).collect());
        Ok((loan["lease"].as_u64().unwrap_or_default(), groups.collect()))
    }

    fn reject(&self, lease: u64, ids: &[String], reason: &str) -> Result<(), Failure> {
        tracing::error!(
            first = %ids.first().map(String::as_str).unwrap_or_default(), trajectories = ids.len(), reason,
            "a group of the pool cannot be used: it goes to the pool's quarantine"
        );
        let body = json!({"lease": lease, "ids": ids, "reason": reason});
        self.client.call("POST", "/pool/reject", &body)?;
        Ok(())
    }

    /// Why nothing was drawn, as far as the pool said.
    pub(crate) fn why_dry(&self) -> String {
        let passed = self.passed_over.lock().map(|told| *told);
        let PassedOver {
            too_small,
            too_long,
        } = passed.unwrap_or_default();
        let mut why = String::new();
        if too_small > 0 {
            let least = self.min_group;
            why += &format!(
                "; {too_small} groups with fewer than {least} trajectories wait there, but this algorithm compares the \
                 trajectories of a group"
            );
        }
        if too_long > 0 {
            why += &format!(
                "; {too_long} groups with paths longer than rollout.max_context_tokens wait there"
            );
        }
        why
    }

    fn give_back(&self, taken: &Taken) -> Result<(), Failure> {
        for (lease, ids) in &taken.leases {
            let body = json!({"lease": lease, "ids": ids});
            self.client.call("POST", "/pool/release", &body)?;
        }
        Ok(())
    }

    /// Tells the pool that what `step` was given is stored here. Returns the episodes that went to
    /// another trainer meanwhile; those must not be trained.
    pub(crate) fn acknowledge(&self, step: u64) -> Result<BTreeSet<EpisodeId>, Failure> {
        let mut lost = BTreeSet::new();
        let leases = self.taken(step)?.map(|t| t.leases).unwrap_or_default();
        for (lease, ids) in leases {
            let body = json!({"lease": lease, "ids": ids});
            let told = self.client.call("POST", "/pool/ack", &body)?;
            let ids = told["lost"].as_array().cloned().unwrap_or_default();
            lost.extend(ids.iter().filter_map(Value::as_str).map(own_id));
        }
        Ok(lost)
    }
}

#[derive(Debug, Args)]
pub(crate) struct PoolArgs {
    /// Where `sinew serve --pool` listens
    #[arg(long, global = true, default_value = "http://127.0.0.1:8080")]
    url: String,
    /// File with its control token
    #[arg(long, global = true, default_value = "token")]
    token_file: PathBuf,
    #[command(subcommand)]
    command: PoolCommand,
}

#[derive(Debug, Subcommand)]
enum PoolCommand {
    /// Count what waits, by task type, and what is in quarantine, by reason
    Status,
    /// Send trajectories: a JSON batch, or an Arrow stream in a file that ends in .arrow
    Push { file: PathBuf },
    /// List the quarantine, oldest first, one JSON object a line
    Quarantine {
        /// Most rows
        #[arg(long, default_value_t = 100)]
        limit: usize,
        /// Start after this row
        #[arg(long)]
        after: Option<String>,
    },
    /// Check a row of the quarantine again, and admit it if nothing speaks against it any more
    Release {
        id: String,
        /// Admit it as another kind: sft or dpo for what says only text
        #[arg(long)]
        kind: Option<String>,
    },
    /// Delete a row of the quarantine
    Delete { id: String },
}

/// `sinew pool`.
pub(crate) fn run(args: &PoolArgs) -> Result<(), Failure> {
    let client = Client::new(&args.url, &args.token_file)?;
    match &args.command {
        PoolCommand::Status => {
            let told = client.call("GET", "/pool", &Value::Null)?;
            let text = serde_json::to_string_pretty(&told).map_err(Failure::system)?;
            output::print(&(text + "\n"));
        }
        PoolCommand::Push { file } => output::print_json(&client.push(file)?),
        PoolCommand::Quarantine { limit, after } => {
            let after = after.as_ref().map(|a| format!("&after={a}"));
            let path = format!(
                "/pool/quarantine?limit={limit}{}",
                after.unwrap_or_default()
            );
            let page = client.call("GET", &path, &Value::Null)?;
            for row in page["rows"]
                .as_array()
                .map(Vec::as_slice)
                .unwrap_or_default()
            {
                output::print_json(row);
            }
        }
        PoolCommand::Release { id, kind } => {
            let path = format!("/pool/quarantine/{id}/release");
            let told = client.call("POST", &path, &json!({"kind": kind}))?;
            output::print_json(&told);
        }
        PoolCommand::Delete { id } => {
            let path = format!("/pool/quarantine/{id}");
            output::print_json(&client.call("DELETE", &path, &Value::Null)?);
        }
    }
    Ok(())
}

impl Client {
    fn push(&self, file: &Path) -> Result<Value, Failure> {
        let unreadable = |e| Failure::input(format!("{}: {e}", file.display()));
        let bytes = Bytes::from(std::fs::read(file).map_err(unreadable)?);
        let arrow = file.extension().is_some_and(|e| e == "arrow");
        let kind = if arrow {
            "application/vnd.apache.arrow.stream"
        } else {
            "application/json"
        };
        let sent = self
            .agent
            .post(format!("{}/pool/trajectories", self.url))
            .header("authorization", format!("Bearer {}", self.token))
            .header("content-type", kind)
            .send(&bytes[..]);
        let failed = |e: &dyn std::fmt::Display| {
            Failure::system(format!(
                "POST {}/pool/trajectories: {e}\n  hint: is `sinew serve --pool` running there?",
                self.url
            ))
        };
        let mut response = sent.map_err(|e| failed(&e))?;
        let status = response.status().as_u16();
        let read = response.body_mut().with_config().limit(MAX_ANSWER_BYTES);
        let text = read.read_to_vec().map_err(|e| failed(&e))?;
        let told: Value = serde_json::from_slice(&text).map_err(|e| failed(&e))?;
        let message = || told["error"]["message"].as_str().unwrap_or_default();
        match status {
            200 => Ok(told),
            429 | 500.. => Err(Failure::system(format!("{status}: {}", message()))),
            _ => Err(Failure::input(format!(
                "{}: {status}: {}",
                file.display(),
                message()
            ))),
        }
    }
}
