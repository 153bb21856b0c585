//! Rows of the trainer with PyTorch: its Python, packages, GPUs and NCCL.

use super::python::output;
use super::row::{Mark, Row};
use crate::gpus::{Gpu, found, gb};
use crate::setup::{variables, versions};
use sinew_torch::{PythonReport, find_python, probe};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// Time to load torch, which takes seconds.
const WITHIN: Duration = Duration::from_secs(45);
/// Makes the environment.
const SETUP: &str = "`sinew setup torch` makes the environment; SINEW_TORCH_PYTHON names another";
/// Prints whether torch has NCCL, and its version.
const NCCL: &str = "
import torch, torch.distributed as dist
if not dist.is_available() or not dist.is_nccl_available():
    raise SystemExit('torch was built without NCCL')
print('NCCL', '.'.join(str(part) for part in torch.cuda.nccl.version()))
";

/// All rows. Those after the first need the interpreter.
pub(super) fn rows(_: &'static str) -> Vec<Row> {
    let python = match find_python(None, &variables()) {
        Ok(python) => python,
        Err(e) => {
            let e = e.to_string();
            let detail = e.split("\n  hint: ").next().unwrap_or_default();
            return vec![Row::new(Mark::Fail, "interpreter", detail, SETUP)];
        }
    };
    let report = match probe(&python, WITHIN) {
        Ok(report) => report,
        Err(e) => {
            return vec![Row::failed(
                Mark::Fail,
                "interpreter",
                &e.to_string(),
                SETUP,
            )];
        }
    };
    let interpreter = Row::ok(
        "interpreter",
        format!("Python {} at {}", report.python, python.display()),
    );
    vec![
        interpreter,
        packages(&report),
        gpus(&report, &found()),
        nccl(&python, &report),
    ]
}

fn packages(report: &PythonReport) -> Row {
    let missing = report.missing();
    if missing.is_empty() {
        return Row::ok("packages", versions(report));
    }
    let detail = format!("missing: {}; {}", missing.join(", "), versions(report));
    Row::new(Mark::Fail, "packages", detail, SETUP)
}

/// GPUs that torch sees, with the memory that the driver reports as free.
fn gpus(report: &PythonReport, found: &[Gpu]) -> Row {
    let each = |gpu: &Gpu| format!("{}: {} free of {}", gpu.name, gb(gpu.free), gb(gpu.bytes));
    let listed: Vec<String> = found.iter().map(each).collect();
    let listed = listed.join("; ");
    if !report.gpus.is_empty() {
        let count = report.gpus.len();
        let detail = if found.is_empty() {
            format!("{count} that torch sees; nvidia-smi reports none")
        } else {
            listed
        };
        return Row::ok("gpus", detail);
    }
    match (found.is_empty(), &report.cuda) {
        (true, _) => Row::new(
            Mark::Warn,
            "gpus",
            "none: torch computes on the CPU",
            "on a machine with GPUs: install the NVIDIA driver, so that `nvidia-smi` lists them",
        ),
        (false, None) => Row::new(
            Mark::Fail,
            "gpus",
            format!("torch was built without CUDA and does not use {listed}"),
            "remove the environment and run `sinew setup torch` without --index-url",
        ),
        (false, Some(cuda)) => Row::new(
            Mark::Fail,
            "gpus",
            format!("torch for CUDA {cuda} does not see {listed}"),
            "update the NVIDIA driver, or install a torch for the CUDA version that `nvidia-smi` reports",
        ),
    }
}

/// NCCL, which ranks on several GPUs need.
fn nccl(python: &Path, report: &PythonReport) -> Row {
    if report.packages.get("torch").is_none_or(Option::is_none) {
        return Row::new(Mark::Fail, "nccl", "torch is missing", SETUP);
    }
    match output(Command::new(python).args(["-c", NCCL])) {
        Ok(said) => Row::ok("nccl", said),
        Err(e) => Row::failed(
            Mark::Warn,
            "nccl",
            &e,
            "several GPUs need it; ranks on CPUs use gloo",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sinew_torch::GpuInfo;

    fn report(cuda: Option<&str>, gpus: usize) -> PythonReport {
        let packages = ["torch", "peft"].map(|name| (name.to_owned(), Some("1.0".to_owned())));
        let gpu = GpuInfo {
            name: "H100".into(),
            bytes: 80,
        };
        PythonReport {
            python: "3.12.1".into(),
            packages: packages.into(),
            cuda: cuda.map(str::to_owned),
            gpus: vec![gpu; gpus],
        }
    }

    #[test]
    fn rows_name_what_to_do() {
        let there = [Gpu {
            name: "H100".into(),
            bytes: 80_000_000_000,
            free: 79_000_000_000,
        }];
        let row = gpus(&report(Some("13.0"), 1), &there);
        assert_eq!(
            (row.mark, row.detail.as_str()),
            (Mark::Ok, "H100: 79.0 GB free of 80.0 GB")
        );
        assert_eq!(gpus(&report(None, 0), &[]).mark, Mark::Warn);
        for (cuda, hint) in [
            (None, "without --index-url"),
            (Some("13.0"), "NVIDIA driver"),
        ] {
            let row = gpus(&report(cuda, 0), &there);
            assert!(row.mark == Mark::Fail && row.hint.unwrap().contains(hint));
        }
        assert_eq!(packages(&report(None, 0)).mark, Mark::Ok);
        let mut missing = report(None, 0);
        missing.packages.insert("peft".into(), None);
        let row = packages(&missing);
        assert!(row.mark == Mark::Fail && row.detail.starts_with("missing: peft; "));
        assert!(row.hint.unwrap().contains("sinew setup torch"));
    }
}
