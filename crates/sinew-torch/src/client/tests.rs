//! A scripted server, and calls that it loses, repeats and refuses.

use super::*;
use crate::wire::{ApplyAnswer, Bin};
use serde::Deserialize;
use serde_json::json;
use std::collections::VecDeque;

/// The fate of a request.
#[derive(Clone, Debug)]
pub(crate) enum Fate {
    /// The connection fails before the server has the request.
    NotSent,
    /// The server computes, and its answer is lost.
    NotAnswered,
    /// The time passes.
    Late,
    /// An error of this kind, by rank 1 in `backward`.
    Error(&'static str),
    /// A status without a map.
    Status(u16),
}

/// A server that computes each number once.
#[derive(Debug, Default)]
pub(crate) struct Fake {
    /// Fates of the next requests; those after them are answered.
    pub(crate) fates: VecDeque<Fate>,
    /// The requests that were computed, as verb and body.
    pub(crate) computed: Vec<(String, Vec<u8>)>,
    /// The answers to these verbs; else an empty map.
    pub(crate) answers: Vec<(&'static str, Vec<u8>)>,
    /// Whether a failure is lasting.
    pub(crate) is_broken: bool,
    kept: Option<(u64, Reply)>,
    now: Duration,
    pauses: usize,
}

/// The numbers of a request.
#[derive(Debug, Deserialize)]
struct Head {
    fence: u64,
    seq: u64,
}

/// A transport to a server that a test can look at.
#[derive(Clone, Debug, Default)]
pub(crate) struct FakeTransport(pub(crate) Arc<Mutex<Fake>>);

pub(crate) fn packed(value: &impl Serialize) -> Vec<u8> {
    rmp_serde::to_vec_named(value).unwrap()
}

fn error(kind: &str) -> Reply {
    let body = json!({"error": {"kind": kind, "text": "it broke", "rank": 1, "phase": "backward"}});
    Reply {
        status: 500,
        body: packed(&body),
    }
}

impl Fake {
    fn answer(&mut self, verb: &str, body: &[u8]) -> Reply {
        if verb == "status" {
            let ranks = json!([{"rank": 0, "phase": "forward", "since_s": 12.4}, {"rank": 1}]);
            let broken = self.is_broken.then(|| json!({"kind": "rank"}));
            let body = json!({"seq": 3, "verb": "forward", "ranks": ranks, "broken": broken});
            let body = packed(&body);
            return Reply { status: 200, body };
        }
        let head: Head = rmp_serde::from_slice(body).unwrap();
        assert_eq!(head.fence, 7);
        match &self.kept {
            Some((last, reply)) if *last == head.seq => return reply.clone(),
            Some((last, _)) if *last + 1 != head.seq => return error("gap"),
            _ => {}
        }
        self.computed.push((verb.to_owned(), body.to_vec()));
        let known = self.answers.iter().find(|(name, _)| *name == verb);
        let empty = || packed(&json!({"seconds": 0.5, "peak_bytes": [100, 200]}));
        let reply = Reply {
            status: 200,
            body: known.map_or_else(empty, |(_, body)| body.clone()),
        };
        self.kept = Some((head.seq, reply.clone()));
        reply
    }
}

impl Transport for FakeTransport {
    fn post(&mut self, verb: &str, body: &Bytes, limit: Duration) -> Result<Reply, Lost> {
        let mut fake = self.0.lock().unwrap();
        let fate = if verb == "status" {
            None
        } else {
            fake.fates.pop_front()
        };
        match fate {
            None => Ok(fake.answer(verb, body)),
            Some(Fate::NotSent) => Err(Lost::Passing("connection refused".into())),
            Some(Fate::NotAnswered) => {
                fake.answer(verb, body);
                Err(Lost::Passing("connection reset".into()))
            }
            Some(Fate::Late) => {
                fake.now += limit;
                Err(Lost::Late)
            }
            Some(Fate::Error(kind)) => {
                let head: Head = rmp_serde::from_slice(body).unwrap();
                fake.kept = Some((head.seq, error(kind)));
                Ok(error(kind))
            }
            Some(Fate::Status(status)) => Ok(Reply {
                status,
                body: b"no".to_vec(),
            }),
        }
    }

    fn pause(&mut self, time: Duration) {
        let mut fake = self.0.lock().unwrap();
        fake.now += time;
        fake.pauses += 1;
    }

    fn now(&self) -> Duration {
        self.0.lock().unwrap().now
    }
}

/// Processes of which one ended after so many looks.
#[derive(Debug)]
struct Dying(usize);

impl Watch for Dying {
    fn ended(&mut self) -> Option<(usize, String)> {
        let ended = self.0 == 0;
        self.0 = self.0.saturating_sub(1);
        ended.then(|| (1, "signal: 9 (SIGKILL)".to_owned()))
    }

    fn expect_end(&mut self) {
        self.0 = usize::MAX;
    }
}

/// A client whose first request has the number 41, and its server.
pub(crate) fn client(fates: &[Fate]) -> (Client, FakeTransport) {
    let server = FakeTransport::default();
    server.0.lock().unwrap().fates = fates.iter().cloned().collect();
    let start = Start { fence: 7, seq: 40 };
    let transport = Box::new(server.clone());
    let client = Client::new(transport, None, start, Deadlines::default());
    (client, server)
}

fn zero(client: &mut Client) -> Result<(), TorchError> {
    let Nothing {} = client.call(Verb::Zero, &Nothing {})?;
    Ok(())
}

fn computed(server: &FakeTransport) -> Vec<u64> {
    let fake = server.0.lock().unwrap();
    let seq = |(_, body): &(String, Vec<u8>)| rmp_serde::from_slice::<Head>(body).unwrap().seq;
    fake.computed.iter().map(seq).collect()
}

#[test]
fn a_lost_call_or_answer_is_repeated_and_computed_once() {
    let (mut client, server) = client(&[Fate::NotSent, Fate::NotAnswered, Fate::NotSent]);
    zero(&mut client).unwrap();
    zero(&mut client).unwrap();
    assert_eq!(computed(&server), [41, 42]);
    assert_eq!(server.0.lock().unwrap().pauses, 3);
}

#[test]
fn a_server_that_stays_away_is_a_lasting_error() {
    let (mut client, server) = client(&[const { Fate::NotSent }; 8]);
    let error = zero(&mut client).unwrap_err();
    assert!(error.to_string().contains("connection refused"), "{error}");
    // It may have the request: no other one gets its number.
    assert_eq!(zero(&mut client), Err(error));
    assert_eq!(computed(&server), [0_u64; 0]);
}

#[test]
fn a_process_that_ended_is_named_instead_of_its_connection() {
    let (mut client, server) = client(&[Fate::NotSent, Fate::NotSent, Fate::NotSent]);
    client.watch = Some(Box::new(Dying(1)));
    let error = zero(&mut client).unwrap_err();
    assert!(matches!(&error, TorchError::Ended { rank: 1, why } if why.contains("signal: 9")));
    assert_eq!(server.0.lock().unwrap().pauses, 1);
    let (mut client, _) = self::client(&[Fate::Error("rank")]);
    client.watch = Some(Box::new(Dying(0)));
    let text = zero(&mut client).unwrap_err().to_string();
    assert!(
        text.contains("rank 1 of the torch trainer ended: signal: 9"),
        "{text}"
    );
    assert!(text.contains("in backward: it broke"), "{text}");
}

#[test]
fn refused_requests_leave_the_client_usable_and_failures_do_not() {
    let (mut client, server) = client(&[Fate::Error("input")]);
    let error = zero(&mut client).unwrap_err();
    assert!(matches!(&error, TorchError::Input(fault) if fault.rank == Some(1)));
    zero(&mut client).unwrap();
    assert_eq!(computed(&server), [42]);
    for kind in ["memory", "rank", "broken", "fence", "gap"] {
        let (mut client, server) = self::client(&[Fate::Error(kind)]);
        server.0.lock().unwrap().is_broken = true;
        let error = zero(&mut client).unwrap_err();
        assert!(error.to_string().contains("it broke"), "{kind}: {error}");
        assert!(!matches!(error, TorchError::Input(_)), "{kind}");
        assert_eq!(zero(&mut client), Err(error));
        assert!(!client.is_usable() && computed(&server).is_empty());
    }
    // A full disk.
    let (mut client, server) = self::client(&[Fate::Error("rank")]);
    let error = zero(&mut client).unwrap_err();
    assert!(matches!(error, TorchError::Input(_)) && client.is_usable());
    zero(&mut client).unwrap();
    assert_eq!(computed(&server), [42]);
}

#[test]
fn a_late_call_reports_the_phase_of_each_rank() {
    let (mut client, _) = client(&[Fate::Late]);
    let error = zero(&mut client).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the torch trainer did not answer `zero` within 120 s; rank 0: forward for 12 s, \
         rank 1: no report"
    );
    assert_eq!(zero(&mut client), Err(error));
}

#[test]
fn another_token_is_said() {
    let (mut client, _) = client(&[Fate::Status(401)]);
    let text = zero(&mut client).unwrap_err().to_string();
    assert!(
        text.contains("the token is not that of the server"),
        "{text}"
    );
}

#[test]
fn an_answer_of_another_form_is_an_error() {
    let (mut client, server) = client(&[]);
    let answer = packed(&json!({"skipped": 5}));
    server.0.lock().unwrap().answers = vec![("apply", answer)];
    let error = client.call::<_, ApplyAnswer>(Verb::Apply, &Nothing {});
    assert!(matches!(
        error,
        Err(TorchError::Answer { verb: "apply", .. })
    ));
}

#[test]
fn usage_is_summed_until_it_is_taken() {
    let (mut client, _) = client(&[Fate::NotSent]);
    zero(&mut client).unwrap();
    zero(&mut client).unwrap();
    let usage = client.take_usage();
    assert_eq!(usage.server_seconds, 1.0);
    assert!((usage.wall_seconds - 0.1).abs() < 1e-9);
    assert_eq!(usage.peak_bytes, [100, 200]);
    assert_eq!(usage.verbs["zero"].calls, 2);
    assert_eq!(client.take_usage(), TorchUsage::default());
}

#[test]
fn a_closed_server_takes_no_call() {
    let (mut client, server) = client(&[]);
    client.close().unwrap();
    assert!(zero(&mut client).is_err());
    assert_eq!(computed(&server), [41]);
}

#[test]
fn requests_have_their_owner_beside_their_fields() {
    #[derive(Serialize)]
    struct Body<'a> {
        column: Bin<'a>,
        name: &'a str,
    }
    let (mut client, server) = client(&[]);
    let body = Body {
        column: Bin::of(&[1.5f32]),
        name: "a",
    };
    let Nothing {} = client.call(Verb::Load, &body).unwrap();
    let fake = server.0.lock().unwrap();
    let (verb, bytes) = &fake.computed[0];
    assert_eq!(verb, "load");
    // A map of 4 entries; the column is a byte string (0xc4) of 4 bytes.
    assert_eq!(bytes[0], 0x84);
    let column = [&b"\xa6column\xc4\x04"[..], &1.5f32.to_le_bytes()].concat();
    assert!(bytes.windows(column.len()).any(|part| part == column));
    let head: Head = rmp_serde::from_slice(bytes).unwrap();
    assert_eq!((head.fence, head.seq), (7, 41));
}
