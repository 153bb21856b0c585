//! Alerts by mail: a bounded queue, a task, a few tries each, one connection for each message.

use crate::config::{MailConfig, SignalsError, Tls};
use crate::send::{Counts, Queue, TRIES};
use lettre::message::Mailbox;
use lettre::message::header::ContentType;
use lettre::transport::smtp::authentication::Credentials;
use lettre::transport::smtp::client::{Tls as Security, TlsParameters};
use lettre::{AsyncSmtpTransport, AsyncTransport, Message, Tokio1Executor};
use sinew_http::{Failure, cause, retry};
use std::fmt::Display;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

type Transport = AsyncSmtpTransport<Tokio1Executor>;

/// Messages that wait. Alerts are few: `max_per_hour` bounds them, too.
const QUEUE: usize = 32;
/// Time of one try.
const TRY: Duration = Duration::from_secs(10);
/// Bytes of a subject and of a text; what is above is cut.
const MAX_SUBJECT: usize = 200;
const MAX_TEXT: usize = 16 * 1024;

/// A message.
#[derive(Clone, Debug)]
pub(crate) struct Mail {
    pub(crate) subject: String,
    pub(crate) text: String,
}

/// Sends messages on a runtime until the queue is dropped. The handle ends when the queue is empty then.
///
/// # Errors
/// If an address is none, or the variable with the password is not set.
pub(crate) fn start(
    config: &MailConfig,
    runtime: &tokio::runtime::Handle,
) -> Result<(Queue<Mail>, JoinHandle<()>), SignalsError> {
    let transport = transport(config)?;
    let from = mailbox("from", &config.from)?;
    let to: Vec<Mailbox> = config
        .to
        .iter()
        .map(|to| mailbox("to", to))
        .collect::<Result<_, _>>()?;
    let (queue, mails, counts) = Queue::new(QUEUE);
    let task = runtime.spawn(work(transport, from, to, mails, counts));
    Ok((queue, task))
}

/// # Errors
/// If it is not an address of mail; the text names the key.
fn mailbox(key: &str, address: &str) -> Result<Mailbox, SignalsError> {
    let parsed = address.parse::<Mailbox>();
    parsed.map_err(|e| wrong(key, address, e))
}

/// A key of `[alerts.mail]` that does not work on this host.
fn wrong(key: &str, value: &str, why: impl Display) -> SignalsError {
    SignalsError::System(format!("alerts.mail.{key} = {value:?}: {why}"))
}

/// The connection that a message will need.
///
/// # Errors
/// If the variable with the password is not set, or TLS cannot be set up.
fn transport(config: &MailConfig) -> Result<Transport, SignalsError> {
    let host = config.host();
    let tls =
        || TlsParameters::new(host.to_owned()).map_err(|e| wrong("server", &config.server, e));
    let security = match config.tls {
        Tls::Always => Security::Wrapper(tls()?),
        Tls::Starttls => Security::Required(tls()?),
        Tls::Never => Security::None,
    };
    let mut builder = Transport::builder_dangerous(host)
        .port(config.port())
        .tls(security)
        .timeout(Some(TRY));
    if let (Some(user), Some(variable)) = (&config.user, &config.password_env) {
        let password = std::env::var(variable).map_err(|e| wrong("password_env", variable, e))?;
        builder = builder.credentials(Credentials::new(user.clone(), password));
    }
    Ok(builder.build())
}

/// Sends one message after another.
async fn work(
    transport: Transport,
    from: Mailbox,
    to: Vec<Mailbox>,
    mut mails: mpsc::Receiver<Mail>,
    counts: Arc<Counts>,
) {
    while let Some(mail) = mails.recv().await {
        let sent = send(&transport, &from, &to, &mail).await;
        if let Err(why) = &sent {
            tracing::warn!(why, "an alert was not mailed");
        }
        counts.add(sent.is_ok());
    }
}

/// Sends a message, again where another try may help.
///
/// # Errors
/// The error of the last try.
async fn send(
    transport: &Transport,
    from: &Mailbox,
    to: &[Mailbox],
    mail: &Mail,
) -> Result<(), String> {
    let message = message(from, to, mail)?;
    let once = || async {
        match transport.send(message.clone()).await {
            Ok(_) => Ok(()),
            // A server that refuses for good is not asked again.
            Err(e) if e.is_permanent() => Err(Failure::Lasting(cause(&e))),
            Err(e) => Err(Failure::Passing(cause(&e), None)),
        }
    };
    retry(TRIES, Some, once).await.map_err(String::from)
}

/// A message of plain text.
///
/// # Errors
/// If it has no recipient.
fn message(from: &Mailbox, to: &[Mailbox], mail: &Mail) -> Result<Message, String> {
    let plain = |c: char| if c.is_control() { ' ' } else { c };
    let subject: String = mail.subject.chars().map(plain).collect();
    let subject = &subject[..subject.floor_char_boundary(MAX_SUBJECT)];
    let text = &mail.text[..mail.text.floor_char_boundary(MAX_TEXT)];
    let mut builder = Message::builder().from(from.clone()).subject(subject);
    for to in to {
        builder = builder.to(to.clone());
    }
    builder
        .header(ContentType::TEXT_PLAIN)
        .body(text.to_owned())
        .map_err(|e| e.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_subject_cannot_add_headers_and_texts_are_cut() {
        let one: Mailbox = "Sinew <a@example.org>".parse().unwrap();
        let mail = Mail {
            subject: format!("run\r\nBcc: evil@example.org {}", "x".repeat(999)),
            text: "é".repeat(MAX_TEXT),
        };
        let bytes = message(&one, std::slice::from_ref(&one), &mail)
            .unwrap()
            .formatted();
        let text = String::from_utf8(bytes).unwrap();
        assert!(
            !text.lines().any(|l| l.to_lowercase().starts_with("bcc")),
            "{text}"
        );
        assert!(text.len() < 4 * MAX_TEXT, "{}", text.len());
    }
}
