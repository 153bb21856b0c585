//! `sinew launch`: a run with its roles, here or on an engine that starts its owner.

use crate::{TrainArgs, output};
use clap::Args;
use sinew_assembly::{Failure, kubernetes_token_file, launch_owner, launched_name};
use sinew_recipe::{LaunchOn, LaunchPlan, Recipe, RunPlan};
use std::path::PathBuf;

/// Arguments of `sinew launch`.
#[derive(Debug, Args)]
pub(crate) struct LaunchArgs {
    #[command(flatten)]
    train: TrainArgs,
    /// Show what would be started, and start nothing
    #[arg(long)]
    dry_run: bool,
}

impl LaunchArgs {
    /// The recipe file.
    pub(crate) fn recipe(&self) -> PathBuf {
        self.train.recipe.clone()
    }
}

/// `sinew launch`.
///
/// # Errors
/// If the recipe or the engine refuses, or a run on this host ends badly.
pub(crate) fn run(mut args: LaunchArgs) -> Result<(), Failure> {
    let recipe = args.train.run.recipe(&args.train.recipe)?;
    let Recipe::Run(mut plan) = recipe else {
        return Err(Failure::input(
            "a chain of runs has no roles of its own\n  hint: `sinew train` runs it on this host",
        ));
    };
    if plan.launch.is_none() && args.train.on.is_none() {
        args.train.on = Some("local".to_owned());
    }
    if let Some(on) = &args.train.on {
        sinew_assembly::launch_on(&mut plan, on)?;
    }
    let Some(launch) = plan.launch.clone() else {
        return Err(Failure::input("the recipe has no [launch]"));
    };
    match launch.on {
        LaunchOn::Local | LaunchOn::Hosts if args.dry_run => {
            output::print(&roles(&launch));
            Ok(())
        }
        // The owner is this process.
        LaunchOn::Local | LaunchOn::Hosts => crate::run_train(&args.train),
        LaunchOn::Slurm | LaunchOn::Ray | LaunchOn::Kubernetes => elsewhere(&args, &plan, &launch),
    }
}

/// Starts the owner on an engine.
fn elsewhere(args: &LaunchArgs, plan: &RunPlan, launch: &LaunchPlan) -> Result<(), Failure> {
    sinew_assembly::check_trained(plan)?;
    let default = || PathBuf::from("runs").join(&plan.name);
    let dir = args.train.run.run_dir.clone().unwrap_or_else(default);
    let words: Vec<String> = std::env::args().skip(1).collect();
    let recipe = &args.train.recipe;
    let typed = passed_on(&words, &recipe.display().to_string());
    let owner = launch_owner(plan, recipe, &dir, &typed, args.dry_run)?;
    if args.train.run.json {
        output::print_json(&serde_json::json!({
            "job": owner.spec.name,
            "command": owner.spec.command,
            "runs_already": owner.runs,
            "dry_run": args.dry_run,
            "asked": owner.shown,
        }));
        return Ok(());
    }
    if args.dry_run {
        output::print(&format!("{}\n", owner.shown));
        return Ok(());
    }
    let state = if owner.runs {
        "runs already"
    } else {
        "is started"
    };
    let name = &owner.spec.name;
    output::print(&format!(
        "{name} {state} on {}\n{}",
        launch.on,
        roles(launch)
    ));
    let hint = match launch.on {
        LaunchOn::Kubernetes => {
            let run = launched_name(plan, &PathBuf::from(&owner.spec.command[4]));
            let token = kubernetes_token_file(&run);
            format!(
                "kubectl port-forward service/{run}-owner 8092, then `sinew status http://127.0.0.1:8092 \
                 --token-file {}`",
                token.display()
            )
        }
        _ => format!("`sinew status {}`", dir.display()),
    };
    output::print(&format!("look: {hint}\n"));
    Ok(())
}

/// The roles that an owner starts.
fn roles(launch: &LaunchPlan) -> String {
    let line = |(name, role): (&str, &sinew_recipe::RoleSection)| {
        let (count, cpus, gpus) = (role.count, role.cpus, role.gpus);
        format!("{name}: {count}, each with {cpus} cpus and {gpus} gpus\n")
    };
    launch.roles().into_iter().map(line).collect()
}

/// The words of the command line that hold for the owner, too: all but those that name recipe, folder and
/// engine.
fn passed_on(words: &[String], recipe: &str) -> Vec<String> {
    let mut kept = Vec::new();
    let (mut command, mut file, mut skip) = (true, true, false);
    for word in words {
        let own = ["--run-dir", "--on"].iter().any(|option| {
            word.strip_prefix(option)
                .is_some_and(|rest| rest.starts_with('='))
        });
        let left_out = if std::mem::take(&mut skip) || own {
            true
        } else if word == "--run-dir" || word == "--on" {
            skip = true;
            true
        } else if word == "launch" && command {
            command = false;
            true
        } else if word == recipe && file {
            file = false;
            true
        } else {
            word == "--dry-run" || word == "--resume"
        };
        if !left_out {
            kept.push(word.clone());
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_of_training_reach_the_owner() {
        let words =
            "--tls-ca ca.pem launch r.toml --on slurm --run-dir=d --seed 3 --dry-run --json";
        let words: Vec<String> = words.split(' ').map(str::to_owned).collect();
        let kept = passed_on(&words, "r.toml");
        assert_eq!(kept, ["--tls-ca", "ca.pem", "--seed", "3", "--json"]);
    }
}
