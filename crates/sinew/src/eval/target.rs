//! The measured model of `sinew eval --bench` and the model that plays a user: from options to their parts.

use clap::Args;
use sinew_assembly::{ChatServers, Failure, MeasuredServers, typed_source};
use sinew_evaluation::SetupUser;

/// Kinds of servers that may stand before an address.
const KINDS: [&str; 5] = ["", "vllm+", "sglang+", "openai+", CHAT];

/// Kind of servers that are sent messages.
const CHAT: &str = "chat+";

/// Options about models.
#[derive(Debug, Args)]
#[command(next_help_heading = "Benchmarks")]
pub(super) struct TargetArgs {
    /// Model whose tokenizer and chat template write the prompts for servers with /v1/completions. Left out
    /// with --model URL: the server is sent messages, by /v1/chat/completions
    #[arg(long, value_name = "MODEL", requires = "bench")]
    tokenizer: Option<String>,
    /// Name of the model at the server of --model URL. Left out: the first that it lists
    #[arg(long, value_name = "NAME", requires = "bench")]
    served_name: Option<String>,
    /// Model that plays the user of tau2: its name at --user-url, else a source as in a recipe, loaded here
    #[arg(long, value_name = "MODEL", requires = "bench")]
    user: Option<String>,
    /// Address of the server of --user, with the chat-completions protocol, such as http://127.0.0.1:8080/v1
    #[arg(long, value_name = "URL", requires = "user")]
    user_url: Option<String>,
    /// Environment variable with the key of that server
    #[arg(long, value_name = "VARIABLE", requires = "user_url")]
    user_key_env: Option<String>,
    /// Price of a million tokens of questions to --user, and of a million of its answers
    #[arg(long, value_name = "IN,OUT", requires = "user", value_parser = price)]
    pub(super) user_price: Option<[f64; 2]>,
}

/// Two prices.
pub(super) fn price(text: &str) -> Result<[f64; 2], String> {
    let parts = text.split(',').map(|part| part.trim().parse::<f64>().ok());
    let parts: Option<Vec<f64>> = parts.collect();
    match parts.as_deref() {
        Some([input, output]) if [input, output].iter().all(|p| p.is_finite() && **p >= 0.0) => {
            Ok([*input, *output])
        }
        _ => Err("allowed: two numbers from 0, such as 0.15,0.60".into()),
    }
}

/// A measured model.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Target {
    /// As it was named.
    pub(super) name: String,
    /// Source of the model in recipes, or of the tokenizer for servers; `None`: servers get messages.
    pub(super) source: Option<String>,
    /// Servers that it is behind.
    pub(super) servers: Option<MeasuredServers>,
}

impl TargetArgs {
    /// The model that `--model` names.
    ///
    /// # Errors
    /// If an option is missing, or has no effect on such a model.
    pub(super) fn target(&self, model: &str) -> Result<Target, Failure> {
        let name = model.to_owned();
        let is_address = |text: &str| text.starts_with("http://") || text.starts_with("https://");
        let kind = KINDS
            .into_iter()
            .find(|kind| model.strip_prefix(kind).is_some_and(is_address));
        let is_chat = kind == Some(CHAT) || (kind == Some("") && self.tokenizer.is_none());
        if self.served_name.is_some() && !is_chat {
            return Err(Failure::input(
                "--served-name: has an effect with --model URL without --tokenizer only; remove it",
            ));
        }
        match (kind, &self.tokenizer) {
            (None, None) => Ok(Target {
                source: Some(typed_source(model)),
                name,
                servers: None,
            }),
            (None, Some(_)) => Err(Failure::input(
                "--tokenizer: has an effect with --model URL only; remove it",
            )),
            (Some(CHAT), Some(_)) => Err(Failure::input(
                "--tokenizer: has no effect with chat+URL, whose server writes the prompts; remove one of them",
            )),
            (Some(_), None) if is_chat => Ok(Target {
                name,
                source: None,
                servers: Some(MeasuredServers::Chat(self.chat(model))),
            }),
            (Some(_), None) => Err(Failure::input(format!(
                "--tokenizer is missing: prompts for {model} are written here, with the chat template of its model\n  \
                 hint: --tokenizer hf:ORG/NAME, or the folder of the model; chat+URL leaves prompts to the server"
            ))),
            (Some(_), Some(tokenizer)) => Ok(Target {
                source: Some(typed_source(tokenizer)),
                servers: Some(MeasuredServers::Prompts(name.clone())),
                name,
            }),
        }
    }

    /// Servers that are sent messages.
    fn chat(&self, addresses: &str) -> ChatServers {
        let each = addresses.split(',').map(str::trim);
        let each = each.map(|address| address.strip_prefix(CHAT).unwrap_or(address));
        ChatServers {
            urls: each.collect::<Vec<_>>().join(","),
            model: self.served_name.clone(),
        }
    }

    /// The model that plays a user, if one is named.
    pub(super) fn user(&self) -> Option<SetupUser> {
        let name = self.user.as_ref()?;
        Some(SetupUser {
            model: match &self.user_url {
                Some(_) => name.clone(),
                None => typed_source(name),
            },
            url: self.user_url.clone(),
            key_env: self.user_key_env.clone(),
        })
    }
}

/// Name of the default folder of a measurement of `model`.
pub(super) fn folder_name(model: &str, args: &TargetArgs) -> String {
    let address = model.trim_end_matches('/').trim_end_matches("/v1");
    let last = address.rsplit('/').next().unwrap_or_default();
    let name = args.served_name.as_deref().unwrap_or(last);
    let safe = |c: char| {
        if c.is_ascii_alphanumeric() || ".-_".contains(c) {
            c
        } else {
            '-'
        }
    };
    name.chars().map(safe).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(tokenizer: Option<&str>, served_name: Option<&str>) -> TargetArgs {
        TargetArgs {
            tokenizer: tokenizer.map(str::to_owned),
            served_name: served_name.map(str::to_owned),
            user: Some("u".into()),
            user_url: Some("http://h/v1".into()),
            user_key_env: None,
            user_price: None,
        }
    }

    #[test]
    fn prices_are_two_numbers() {
        assert_eq!(price("0.15, 0.6"), Ok([0.15, 0.6]));
        for wrong in ["", "1", "1,2,3", "1,-2", "1,NaN", "a,b"] {
            assert!(price(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn addresses_are_sent_messages_unless_a_tokenizer_writes_prompts() {
        let chat = args(None, Some("m"))
            .target("http://a:1/v1,http://b:2")
            .unwrap();
        let servers = ChatServers {
            urls: "http://a:1/v1,http://b:2".into(),
            model: Some("m".into()),
        };
        assert_eq!(
            (chat.source, chat.servers),
            (None, Some(MeasuredServers::Chat(servers)))
        );
        let typed = args(None, None)
            .target("chat+https://a,chat+https://b")
            .unwrap();
        let Some(MeasuredServers::Chat(servers)) = typed.servers else {
            panic!("{typed:?}");
        };
        assert_eq!(servers.urls, "https://a,https://b");
        let prompts = args(Some("hf:a/b"), None).target("vllm+http://a").unwrap();
        assert_eq!(prompts.source.as_deref(), Some("hf:a/b"));
        assert_eq!(
            prompts.servers,
            Some(MeasuredServers::Prompts("vllm+http://a".into()))
        );
        let local = args(None, None).target("hf:a/b").unwrap();
        assert_eq!(
            (local.source.as_deref(), local.servers),
            (Some("hf:a/b"), None)
        );
        let user = args(None, None).user().unwrap();
        assert_eq!(
            (user.model.as_str(), user.url.as_deref()),
            ("u", Some("http://h/v1"))
        );
    }

    #[test]
    fn options_without_effect_are_refused() {
        for (tokenizer, name, model, said) in [
            (Some("t"), None, "m", "has an effect with --model URL only"),
            (
                Some("t"),
                None,
                "chat+http://a",
                "has no effect with chat+URL",
            ),
            (None, None, "openai+http://a", "--tokenizer is missing"),
            (Some("t"), Some("n"), "http://a", "--served-name"),
            (None, Some("n"), "hf:a/b", "--served-name"),
        ] {
            let refused = args(tokenizer, name).target(model).unwrap_err();
            assert!(refused.text().contains(said), "{}", refused.text());
        }
    }

    #[test]
    fn folders_are_named_by_the_model_or_its_server() {
        assert_eq!(folder_name("hf:a/b@c", &args(None, None)), "b-c");
        assert_eq!(
            folder_name("http://127.0.0.1:80/v1/", &args(None, None)),
            "127.0.0.1-80"
        );
        assert_eq!(folder_name("http://h", &args(None, Some("m/n"))), "m-n");
    }
}
