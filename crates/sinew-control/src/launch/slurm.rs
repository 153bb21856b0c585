//! Slurm, by its programs `sbatch`, `squeue` and `scancel`: one job for each role.
//!
//! The script of a job comes from a template, which a user may replace. Log files lie in a folder that all
//! hosts see. A job is found by its name, so that a repeated submission starts nothing.

use super::{LaunchError, Launched, LaunchedRole, Launcher, RoleSpec, files, quoted, shell_line};
use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const ENGINE: &str = "slurm";
/// Time for one program.
const CALL_TIME: Duration = Duration::from_secs(60);
/// Interval of looks at a program that runs.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// Maximum bytes of a program's output.
const MAX_OUTPUT: u64 = 16 << 20;
/// Maximum bytes of a template.
const MAX_TEMPLATE: u64 = 64 << 10;

/// The script of a job. Placeholders: `{{name}}`, `{{log}}`, `{{resources}}`, `{{options}}`,
/// `{{environment}}` and `{{command}}`, which must be there.
pub const SLURM_TEMPLATE: &str = "#!/bin/sh
#SBATCH --job-name={{name}}
#SBATCH --output={{log}}
#SBATCH --open-mode=append
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --signal=B:TERM@60
{{resources}}
{{options}}
{{environment}}
exec {{command}}
";

const PLACEHOLDERS: [&str; 6] = [
    "name",
    "log",
    "resources",
    "options",
    "environment",
    "command",
];

/// Settings of a launcher for Slurm.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlurmOptions {
    /// Name of the run, with which the names of its jobs begin.
    pub run: String,
    /// Folder of the log files, on a file system that all hosts share.
    pub logs: PathBuf,
    /// File with another template; `None`: [`SLURM_TEMPLATE`].
    pub template: Option<PathBuf>,
    /// Further options of `sbatch`, such as `--partition=gpu`.
    pub options: Vec<String>,
    /// Folder of `sbatch`, `squeue` and `scancel`; `None`: they are looked for in the path.
    pub programs: Option<PathBuf>,
}

/// Starts roles as jobs of Slurm.
#[derive(Debug)]
pub struct SlurmLauncher {
    options: SlurmOptions,
    template: String,
}

impl SlurmLauncher {
    /// Reads the template. The folder of the logs is made when the first role starts.
    ///
    /// # Errors
    /// If the template cannot be read or has an unknown placeholder, or an option is none.
    pub fn new(options: SlurmOptions) -> Result<Self, LaunchError> {
        let template = match &options.template {
            Some(path) => read_template(path)?,
            None => SLURM_TEMPLATE.to_owned(),
        };
        check_template(&template)?;
        for option in &options.options {
            if !option.starts_with("--") || option.contains(char::is_control) {
                let allowed = "an option of sbatch on one line, such as --partition=gpu";
                return Err(LaunchError::setting(
                    "launch.slurm.options",
                    option,
                    allowed,
                ));
            }
        }
        Ok(Self { options, template })
    }

    /// The script of a role's job.
    pub fn script(&self, spec: &RoleSpec) -> String {
        let mut resources = vec![format!("--cpus-per-task={}", spec.cpus.max(1))];
        if spec.gpus > 0 {
            resources.push(format!("--gres=gpu:{}", spec.gpus));
        }
        if let Some(memory_mb) = spec.memory_mb {
            resources.push(format!("--mem={memory_mb}M"));
        }
        if let Some(folder) = &spec.folder {
            resources.push(format!("--chdir={}", folder.display()));
        }
        // The supervisor restarts roles; nobody restarts the owner.
        let requeue = if spec.requeue {
            "--requeue"
        } else {
            "--no-requeue"
        };
        resources.push(requeue.to_owned());
        let lines = |options: &[String]| {
            let lines = options.iter().map(|option| format!("#SBATCH {option}"));
            lines.collect::<Vec<_>>().join("\n")
        };
        let exports = spec
            .env
            .iter()
            .map(|(name, value)| format!("export {name}={}", quoted(value)));
        let values = BTreeMap::from([
            ("name", spec.name.clone()),
            ("log", self.log(&spec.name).display().to_string()),
            ("resources", lines(&resources)),
            ("options", lines(&self.options.options)),
            ("environment", exports.collect::<Vec<_>>().join("\n")),
            ("command", shell_line(&spec.command)),
        ]);
        filled(&self.template, &values)
    }

    fn log(&self, name: &str) -> PathBuf {
        self.options.logs.join(format!("{name}.log"))
    }

    /// Runs one of Slurm's programs to its end, and gives its output.
    fn run(&self, program: &str, arguments: &[&str], input: &str) -> Result<String, LaunchError> {
        let path = match &self.options.programs {
            Some(folder) => folder.join(program),
            None => PathBuf::from(program),
        };
        let child = Command::new(&path)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn();
        let mut child = child.map_err(|error| LaunchError::Program {
            engine: ENGINE,
            program: path.display().to_string(),
            error,
        })?;
        let failed = |why: String| LaunchError::call(ENGINE, program, why);
        if let Some(mut stdin) = child.stdin.take() {
            // A program that ends before it read everything says why in its output.
            let _ = stdin.write_all(input.as_bytes());
        }
        // Both outputs are read at the same time: a full pipe would stop the program.
        let output = child.stdout.take().map(read_in_thread);
        let errors = child.stderr.take().map(read_in_thread);
        let end = Instant::now() + CALL_TIME;
        let status = loop {
            match child.try_wait() {
                Ok(Some(status)) => break status,
                Ok(None) if Instant::now() < end => std::thread::sleep(LOOK_EVERY),
                Ok(None) => {
                    let _ = child.kill();
                    let _ = child.wait();
                    return Err(failed(format!("no end after {} s", CALL_TIME.as_secs())));
                }
                Err(e) => return Err(failed(e.to_string())),
            }
        };
        let text = |reader: Option<std::thread::JoinHandle<String>>| {
            reader
                .and_then(|reader| reader.join().ok())
                .unwrap_or_default()
        };
        let (output, errors) = (text(output), text(errors));
        if status.success() {
            return Ok(output);
        }
        Err(failed(format!(
            "{status}: {}",
            files::last_lines(&errors, 5)
        )))
    }

    /// The jobs of the run, with their numbers.
    fn jobs(&self) -> Result<Vec<(String, LaunchedRole)>, LaunchError> {
        let format = "--format=%i|%j|%T|%r";
        let text = self.run(
            "squeue",
            &["--noheader", "--me", "--states=all", format],
            "",
        )?;
        Ok(text.lines().filter_map(|line| self.job(line)).collect())
    }

    /// A line `number|name|state|reason` of a job of this run.
    fn job(&self, line: &str) -> Option<(String, LaunchedRole)> {
        let mut parts = line.trim().splitn(4, '|');
        let (number, name, state) = (parts.next()?, parts.next()?, parts.next()?);
        let own = name.strip_prefix(&self.options.run)?;
        let reason = parts.next().unwrap_or_default();
        let role = LaunchedRole {
            name: name.to_owned(),
            state: job_state(state, reason),
        };
        own.starts_with('-').then(|| (number.to_owned(), role))
    }
}

/// Reads an output to its end, as text, up to the limit.
fn read_in_thread(from: impl Read + Send + 'static) -> std::thread::JoinHandle<String> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        // An output that breaks off is as good as it is.
        let _ = from.take(MAX_OUTPUT).read_to_end(&mut bytes);
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

/// State of a job by Slurm's word for it (squeue(1), JOB STATE CODES).
fn job_state(state: &str, reason: &str) -> Launched {
    match state {
        "PENDING" | "CONFIGURING" | "REQUEUED" | "REQUEUE_FED" | "REQUEUE_HOLD"
        | "RESV_DEL_HOLD" | "SPECIAL_EXIT" => {
            Launched::Waiting(format!("slurm: {state} ({reason})"))
        }
        "RUNNING" | "COMPLETING" | "SUSPENDED" | "STOPPED" | "SIGNALING" | "RESIZING"
        | "STAGE_OUT" => Launched::Running,
        _ => Launched::Ended(format!("slurm: {state} ({reason})")),
    }
}

fn read_template(path: &Path) -> Result<String, LaunchError> {
    let file = fs::File::open(path).map_err(LaunchError::file("read", path))?;
    let mut text = String::new();
    file.take(MAX_TEMPLATE)
        .read_to_string(&mut text)
        .map_err(LaunchError::file("read", path))?;
    Ok(text)
}

/// Refuses a template with a placeholder that is not known, or without the command.
fn check_template(template: &str) -> Result<(), LaunchError> {
    let names = template.split("{{").skip(1);
    let names: Vec<&str> = names
        .map(|rest| rest.split("}}").next().unwrap_or(rest))
        .collect();
    let allowed = || format!("{{{{command}}}}, which must be there, and {PLACEHOLDERS:?}");
    match names.iter().find(|name| !PLACEHOLDERS.contains(name)) {
        Some(name) => Err(LaunchError::setting(
            "launch.slurm.template",
            name,
            allowed(),
        )),
        None if !names.contains(&"command") => {
            let missing = "a template without {{command}}";
            Err(LaunchError::setting(
                "launch.slurm.template",
                missing,
                allowed(),
            ))
        }
        None => Ok(()),
    }
}

/// A template with the values of its placeholders; lines that only an empty value stands on are left out.
fn filled(template: &str, values: &BTreeMap<&str, String>) -> String {
    let mut text = String::new();
    for line in template.lines() {
        let bare = line
            .trim()
            .strip_prefix("{{")
            .and_then(|rest| rest.strip_suffix("}}"));
        if bare
            .and_then(|name| values.get(name))
            .is_some_and(String::is_empty)
        {
            continue;
        }
        let mut rest = line;
        while let Some((before, after)) = rest.split_once("{{") {
            let (name, after) = after.split_once("}}").unwrap_or((after, ""));
            text.push_str(before);
            text.push_str(values.get(name).map_or("", String::as_str));
            rest = after;
        }
        text.push_str(rest);
        text.push('\n');
    }
    text
}

impl Launcher for SlurmLauncher {
    fn name(&self) -> &'static str {
        ENGINE
    }

    fn preview(&self, spec: &RoleSpec) -> Result<String, LaunchError> {
        Ok(self.script(spec))
    }

    fn ensure(&self, spec: &RoleSpec) -> Result<(), LaunchError> {
        let jobs = self.jobs()?;
        if jobs.iter().any(|(_, job)| job.name == spec.name) {
            return Ok(());
        }
        let logs = &self.options.logs;
        fs::create_dir_all(logs).map_err(LaunchError::file("make", logs))?;
        self.run("sbatch", &["--parsable"], &self.script(spec))
            .map(drop)
    }

    fn list(&self) -> Result<Vec<LaunchedRole>, LaunchError> {
        Ok(self.jobs()?.into_iter().map(|(_, job)| job).collect())
    }

    fn logs(&self, name: &str, lines: usize) -> Result<String, LaunchError> {
        let path = self.log(name);
        files::tail(&path, lines).map_err(LaunchError::file("read", &path))
    }

    fn stop(&self, name: &str) -> Result<(), LaunchError> {
        for (number, job) in self.jobs()? {
            if job.name == name && !matches!(job.state, Launched::Ended(_)) {
                self.run("scancel", &[&number], "")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn launcher(template: Option<&str>) -> Result<SlurmLauncher, LaunchError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("job.sh");
        if let Some(text) = template {
            fs::write(&path, text).unwrap();
        }
        SlurmLauncher::new(SlurmOptions {
            run: "demo-1".into(),
            logs: dir.path().join("logs"),
            template: template.map(|_| path),
            options: vec!["--partition=gpu".into()],
            programs: None,
        })
    }

    fn spec() -> RoleSpec {
        RoleSpec {
            name: "demo-1-rollout-0-0".into(),
            command: ["sinew", "worker", "--name", "a b"]
                .map(str::to_owned)
                .into(),
            env: vec![("SINEW_LOG".into(), "a b".into())],
            folder: Some("/work".into()),
            cpus: 2,
            gpus: 1,
            memory_mb: Some(512),
            requeue: false,
        }
    }

    #[test]
    fn a_script_has_everything_that_a_job_needs() {
        let script = launcher(None).unwrap().script(&spec());
        for line in [
            "#SBATCH --job-name=demo-1-rollout-0-0",
            "#SBATCH --cpus-per-task=2",
            "#SBATCH --gres=gpu:1",
            "#SBATCH --mem=512M",
            "#SBATCH --chdir=/work",
            "#SBATCH --no-requeue",
            "#SBATCH --partition=gpu",
            "export SINEW_LOG='a b'",
            "exec sinew worker --name 'a b'",
        ] {
            assert!(script.lines().any(|l| l == line), "{line}\n{script}");
        }
        let bare = RoleSpec {
            env: Vec::new(),
            ..spec()
        };
        let script = launcher(None).unwrap().script(&bare);
        assert!(script.lines().all(|line| !line.is_empty()), "{script}");
    }

    #[test]
    fn a_template_of_a_user_is_checked_first() {
        let own = launcher(Some("#!/bin/sh\nsrun {{command}}\n")).unwrap();
        assert!(own.script(&spec()).contains("srun sinew worker"));
        let why = launcher(Some("{{command}} {{gpu}}"))
            .unwrap_err()
            .to_string();
        assert!(why.contains("gpu") && why.contains("resources"), "{why}");
        let why = launcher(Some("#!/bin/sh\n")).unwrap_err().to_string();
        assert!(why.contains("{{command}}"), "{why}");
    }

    #[test]
    fn only_jobs_of_the_run_are_listed() {
        let slurm = launcher(None).unwrap();
        let read = |line: &str| slurm.job(line).map(|(number, job)| (number, job.state));
        let running = read("12|demo-1-engine-0-0|RUNNING|None");
        assert_eq!(running, Some(("12".into(), Launched::Running)));
        let waiting = read("12|demo-1-engine-0-0|PENDING|Resources").unwrap().1;
        assert_eq!(
            waiting,
            Launched::Waiting("slurm: PENDING (Resources)".into())
        );
        let failed = read("13|demo-1-engine-0-0|NODE_FAIL|NonZeroExitCode")
            .unwrap()
            .1;
        assert_eq!(
            failed,
            Launched::Ended("slurm: NODE_FAIL (NonZeroExitCode)".into())
        );
        assert_eq!(read("14|demo-12-engine-0-0|RUNNING|None"), None);
        assert_eq!(read("15"), None);
    }
}
