//! `sinew check-template`: does a chat template break reinforcement learning? See docs/check-template.md.
//!
//! Only tokenizer and template are read; weights are neither needed nor downloaded.

use crate::output;
use clap::Args;
use serde_json::{Value, json};
use sinew_assembly::Failure;
use sinew_model::{ModelFiles, resolve_model};
use sinew_recipe::TemplateOptions;
use sinew_render::{CaseReport, ChatRenderer, Renderer, Rewrite, Verdict, check_template};
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

/// Variables by which templates keep thinking in the history, with the value that does.
const KEEPING: [(&str, bool); 6] = [
    ("preserve_thinking", true),
    ("keep_past_thinking", true),
    ("keep_thinking", true),
    ("clear_thinking", false),
    ("drop_thinking", false),
    ("truncate_history_thinking", false),
];

/// Arguments of `sinew check-template`.
#[derive(Debug, Args)]
pub(crate) struct CheckTemplateArgs {
    /// Folder of a model or of a run, a GGUF file, `package:NAME`, `hf:ORG/NAME`, or a template of its own: a
    /// file that ends in .jinja
    model: String,
    /// Variables of the template as JSON, such as '{"enable_thinking": false}'
    #[arg(long, value_name = "JSON")]
    template: Option<String>,
    /// One JSON object a case, the last one with the counts
    #[arg(long)]
    json: bool,
}

/// The renderer that is checked.
enum Checked {
    /// Template of a model or a file, whose variables can be changed.
    Chat(Box<ChatRenderer>),
    /// Template of a run.
    Run(Arc<dyn Renderer>),
}

impl Checked {
    fn renderer(&self) -> &dyn Renderer {
        match self {
            Self::Chat(renderer) => renderer.as_ref(),
            Self::Run(renderer) => renderer.as_ref(),
        }
    }
}

/// A variable of the template that makes more cases exact.
struct Setting {
    name: &'static str,
    value: bool,
    exact: usize,
}

/// Checks a template and reports every case. A broken case is a failure.
pub(crate) fn run(args: &CheckTemplateArgs) -> Result<(), Failure> {
    let options = options(args)?;
    let checked = checked(&args.model, &options)?;
    let reports = check_template(checked.renderer());
    let settings = match &checked {
        Checked::Chat(renderer) => settings(renderer, &reports),
        Checked::Run(_) => Vec::new(),
    };
    if args.json {
        print_json(&checked, &reports, &settings);
    } else {
        print_text(args, &checked, &reports, &settings);
    }
    match reports.iter().find(|r| r.verdict == Verdict::Broken) {
        None => Ok(()),
        Some(first) => {
            let broken = count(&reports, Verdict::Broken);
            let reason = first.reason.as_deref().unwrap_or_default();
            let cases = reports.len();
            Err(Failure::system(format!(
                "{broken} of {cases} cases are broken; the first, {}: {reason}",
                first.name
            )))
        }
    }
}

/// The variables of `--template`.
fn options(args: &CheckTemplateArgs) -> Result<TemplateOptions, Failure> {
    let Some(text) = &args.template else {
        return Ok(TemplateOptions::default());
    };
    serde_json::from_str(text).map_err(|e| {
        Failure::input(format!(
            "--template = {text:?}: {e}; allowed: a JSON object, such as {{\"enable_thinking\": false}}"
        ))
    })
}

/// Reads tokenizer and template.
fn checked(model: &str, options: &TemplateOptions) -> Result<Checked, Failure> {
    let failed = |e: &dyn std::fmt::Display| Failure::input(format!("{model}: {e}"));
    let path = Path::new(model);
    let chat = |renderer| Checked::Chat(Box::new(renderer));
    if path.extension().is_some_and(|e| e == "jinja") {
        let source = std::fs::read_to_string(path).map_err(|e| failed(&e))?;
        let options = options.0.clone().into_iter().collect();
        let renderer = ChatRenderer::of_template(&source, options);
        return renderer.map(chat).map_err(|e| failed(&e));
    }
    if let Some(run) = sinew_assembly::run_model(&sinew_assembly::typed_source(model))? {
        return run.renderer_with(options).map(Checked::Run);
    }
    let files = if path.is_dir() {
        ModelFiles::Dir(path.to_owned())
    } else {
        // The hub sends no weights to a model of a service.
        let source = match model.strip_prefix("hf:") {
            Some(name) => format!("tinker:{name}"),
            None => model.to_owned(),
        };
        resolve_model(&source, &sinew_assembly::resolve_env()).map_err(|e| failed(&e))?
    };
    sinew_assembly::chat_renderer(&files, options).map(chat)
}

/// Variables of the template that make more cases exact and break none.
fn settings(renderer: &ChatRenderer, reports: &[CaseReport]) -> Vec<Setting> {
    let (exact, broken) = (
        count(reports, Verdict::Exact),
        count(reports, Verdict::Broken),
    );
    let tried = KEEPING.iter().filter_map(|&(name, value)| {
        let mut options = renderer.template_options();
        options.insert(name.to_owned(), value.into());
        // A template that does not read the variable refuses it.
        let reports = check_template(&renderer.with_options(options).ok()?);
        let now = count(&reports, Verdict::Exact);
        let better = now > exact && count(&reports, Verdict::Broken) <= broken;
        better.then_some(Setting {
            name,
            value,
            exact: now,
        })
    });
    tried.collect()
}

fn count(reports: &[CaseReport], verdict: Verdict) -> usize {
    reports.iter().filter(|r| r.verdict == verdict).count()
}

fn print_json(checked: &Checked, reports: &[CaseReport], settings: &[Setting]) {
    for report in reports {
        let rewrites: Vec<_> = report.rewrites.iter().map(|r| r.name()).collect();
        output::print_json(&json!({
            "case": report.name,
            "verdict": report.verdict.name(),
            "rewrites": rewrites,
            "compared": report.compared,
            "difference": report.difference,
            "reason": report.reason,
        }));
    }
    let set = |s: &Setting| json!({ "template": { s.name: s.value }, "exact": s.exact });
    let format = checked.renderer().turn_format();
    output::print_json(&json!({
        "template": checked.renderer().template_hash(),
        "tool_calls": format.calls.map(|f| f.name()),
        "thinking": format.reasoning.map(|r| [r.open, r.close]),
        "exact": count(reports, Verdict::Exact),
        "realigned": count(reports, Verdict::Realigned),
        "refused": count(reports, Verdict::Refused),
        "broken": count(reports, Verdict::Broken),
        "settings": settings.iter().map(set).collect::<Vec<Value>>(),
    }));
}

fn print_text(
    args: &CheckTemplateArgs,
    checked: &Checked,
    reports: &[CaseReport],
    settings: &[Setting],
) {
    let format = checked.renderer().turn_format();
    let calls = format.calls.map_or("none known".into(), |f| f.name());
    let thinking = match format.reasoning {
        Some(marks) => format!("{:?} to {:?}", marks.open, marks.close),
        None => "none".into(),
    };
    let mut out = format!("{}: calls {calls}, thinking {thinking}\n\n", args.model);
    for report in reports {
        out += &case_lines(report);
    }
    let named = [
        Verdict::Exact,
        Verdict::Realigned,
        Verdict::Refused,
        Verdict::Broken,
    ];
    let counts = named.map(|verdict| format!("{} {}", count(reports, verdict), verdict.name()));
    out += &format!("\n{} cases: {}\n", reports.len(), counts.join(", "));
    out += &advice(reports, settings);
    output::print(&out);
}

/// A case, and its first difference.
fn case_lines(report: &CaseReport) -> String {
    let rewrites: Vec<_> = report.rewrites.iter().map(|r| r.name()).collect();
    let line = format!(
        "{:44} {:10} {}",
        report.name,
        report.verdict.name(),
        rewrites.join(", ")
    );
    let mut out = line.trim_end().to_owned() + "\n";
    if let Some(found) = &report.difference {
        out += &format!(
            "    turn {}, token {}, after ...{:?}\n      sampled {:?}\n      rebuilt {:?}\n",
            found.turn, found.token, found.before, found.sampled, found.rebuilt
        );
    }
    if let Some(reason) = &report.reason {
        out += &format!("    {reason}\n");
    }
    out
}

/// The meaning for training of what was found, and what to set.
fn advice(reports: &[CaseReport], settings: &[Setting]) -> String {
    let mut out = String::new();
    let rewrites: BTreeSet<Rewrite> = reports.iter().flat_map(|r| r.rewrites.clone()).collect();
    for rewrite in rewrites {
        out += &format!("\n{}: {}\n", rewrite.name(), meaning(rewrite));
    }
    for setting in settings {
        out += &format!(
            "\ntemplate = {{ {} = {} }}: {} of {} cases are exact\n",
            setting.name,
            setting.value,
            setting.exact,
            reports.len()
        );
    }
    if count(reports, Verdict::Refused) > 0 {
        out += "\nrefused: the template raises an error for such a conversation, so that no server can answer it. The \
                gateway makes a user message of a later system message.\n";
    }
    if count(reports, Verdict::Broken) > 0 {
        out += "\nbroken: a policy trained on such conversations would learn from contexts that no model was given, or its \
                calls would not be read. Use another template, or keep such conversations out of training.\n";
    }
    out
}

/// Consequence of a rewrite for training, and what to set.
fn meaning(rewrite: Rewrite) -> &'static str {
    match rewrite {
        Rewrite::Reasoning => {
            "the template leaves thinking of earlier turns out. A trainer that renders histories from messages trains \
             turns behind contexts that were not sampled. Sinew samples and trains behind the thinking \
             (rollout.thinking = \"kept\"), or behind what a server shows (\"dropped\"): choose what will be deployed."
        }
        Rewrite::Tokens => {
            "the same text splits into other tokens. The sampled ones stay; there is nothing to set."
        }
        Rewrite::Ending => {
            "the history ends a turn with another token than the one that was sampled. The sampled one stays; there is \
             nothing to set."
        }
        Rewrite::Whitespace => {
            "the template trims whitespace of earlier turns. It stays as sampled; there is nothing to set."
        }
        Rewrite::Tools => {
            "the template moves the descriptions of tools to the last question. They stay where they were sampled; a \
             server of other software moves them."
        }
        Rewrite::System => {
            "the template moves the system message to the last question. It stays where it was sampled; a server of \
             other software moves it."
        }
    }
}
