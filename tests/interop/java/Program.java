import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.*;
import java.util.concurrent.*;
import org.apache.kafka.clients.admin.*;
import org.apache.kafka.clients.consumer.*;
import org.apache.kafka.clients.producer.*;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.config.ConfigResource;
import org.apache.kafka.common.header.Header;

/** A program that holds Java clients for the tests; see ../programs.py for the lines it reads. */
public class Program {
    static final Map<Integer, Object> objects = new ConcurrentHashMap<>();
    static int last;

    public static void main(String[] args) throws Exception {
        ExecutorService threads = Executors.newCachedThreadPool();
        Scanner lines = new Scanner(System.in, "US-ASCII");
        while (lines.hasNextLine()) {
            String[] parts = lines.nextLine().split(" ");
            byte[][] words = new byte[parts.length - 3][];
            for (int i = 3; i < parts.length; i++)
                words[i - 3] = parts[i].equals("-") ? null : Base64.getDecoder().decode(parts[i].substring(1));
            threads.execute(() -> answer(parts[0], parts[1], Integer.parseInt(parts[2]), words));
        }
        Runtime.getRuntime().halt(0);
    }

    static void answer(String call, String method, int target, byte[][] words) {
        StringBuilder text = new StringBuilder(call);
        try {
            List<byte[]> found = run(method, target, words);
            text.append(" ok");
            for (byte[] each : found)
                text.append(each == null ? " -" : " =" + Base64.getEncoder().encodeToString(each));
        } catch (Throwable error) {
            Throwable cause = error instanceof ExecutionException ? error.getCause() : error;
            text.append(" error =").append(Base64.getEncoder().encodeToString(bytes(cause)));
        }
        synchronized (System.out) {
            System.out.println(text);
            System.out.flush();
        }
    }

    static byte[] bytes(Object value) {
        return value.toString().getBytes(StandardCharsets.UTF_8);
    }

    static String text(byte[] word) {
        return word == null ? null : new String(word, StandardCharsets.UTF_8);
    }

    static int number(byte[] word) {
        return Integer.parseInt(text(word));
    }

    static List<byte[]> kept(Object each) {
        synchronized (objects) {
            objects.put(++last, each);
            return List.of(bytes(last));
        }
    }

    static TopicPartition place(byte[][] words) {
        return new TopicPartition(text(words[0]), number(words[1]));
    }

    static List<byte[]> optional(Object value) {
        return Collections.singletonList(value == null ? null : bytes(value));
    }

    @SuppressWarnings("unchecked")
    static List<byte[]> run(String method, int target, byte[][] words) throws Exception {
        Object self = objects.get(target);
        KafkaProducer<byte[], byte[]> producer = self instanceof KafkaProducer ? (KafkaProducer<byte[], byte[]>) self : null;
        KafkaConsumer<byte[], byte[]> consumer = self instanceof KafkaConsumer ? (KafkaConsumer<byte[], byte[]>) self : null;
        List<byte[]> found = new ArrayList<>();
        switch (method) {
            case "producer": return kept(producer(words));
            case "consumer": return kept(consumer(words));
            case "admin": return admin(words);
            case "flush": flush(producer, words); break;
            case "begin": producer.beginTransaction(); break;
            case "end":
                if (text(words[0]).equals("commit"))
                    producer.commitTransaction();
                else
                    producer.abortTransaction();
                break;
            case "offsets":
                KafkaConsumer<byte[], byte[]> reader = (KafkaConsumer<byte[], byte[]>) objects.get(number(words[3]));
                producer.sendOffsetsToTransaction(
                    Map.of(place(words), new OffsetAndMetadata(number(words[2]))), reader.groupMetadata());
                break;
            case "assign":
                consumer.assign(List.of(place(words)));
                if (text(words[2]).equals("start"))
                    consumer.seekToBeginning(List.of(place(words)));
                else if (text(words[2]).equals("end"))
                    consumer.seekToEnd(List.of(place(words)));
                else
                    consumer.seek(place(words), number(words[2]));
                if (!Character.isDigit(text(words[2]).charAt(0)))
                    consumer.position(place(words));
                break;
            case "offset_at":
                OffsetAndTimestamp at = consumer.offsetsForTimes(Map.of(place(words), Long.parseLong(text(words[2])))).get(place(words));
                return optional(at == null ? null : at.offset());
            case "poll":
                for (ConsumerRecord<byte[], byte[]> each : consumer.poll(Duration.ofMillis(number(words[0])))) {
                    Collections.addAll(found, bytes(each.topic()), bytes(each.partition()), bytes(each.offset()),
                        bytes(each.timestamp()), each.value(), each.key(), bytes(each.headers().toArray().length));
                    for (Header header : each.headers())
                        Collections.addAll(found, bytes(header.key()), header.value());
                }
                break;
            case "assignment":
                for (TopicPartition each : consumer.assignment())
                    Collections.addAll(found, bytes(each.topic()), bytes(each.partition()));
                break;
            case "commit": consumer.commitSync(); break;
            case "committed":
                OffsetAndMetadata committed = consumer.committed(Set.of(place(words))).get(place(words));
                return optional(committed == null ? null : committed.offset());
            case "close":
                if (producer != null)
                    producer.close(Duration.ofSeconds(5));
                else
                    consumer.close();
                break;
            default: throw new IllegalArgumentException(method);
        }
        return found;
    }

    static Map<String, Object> settings(byte[][] words) {
        Map<String, Object> all = new HashMap<>();
        all.put("bootstrap.servers", text(words[0]));
        all.put("key.serializer", "org.apache.kafka.common.serialization.ByteArraySerializer");
        all.put("value.serializer", "org.apache.kafka.common.serialization.ByteArraySerializer");
        all.put("key.deserializer", "org.apache.kafka.common.serialization.ByteArrayDeserializer");
        all.put("value.deserializer", "org.apache.kafka.common.serialization.ByteArrayDeserializer");
        return all;
    }

    static KafkaProducer<byte[], byte[]> producer(byte[][] words) {
        Map<String, Object> all = settings(words);
        all.put("compression.type", text(words[1]));
        all.put("enable.idempotence", number(words[3]) == 1 || words[4] != null);
        all.put("acks", text(words[2]));
        all.put("linger.ms", 5);
        all.put("max.request.size", number(words[5]));
        all.put("batch.size", number(words[5]));
        if (words[4] != null)
            all.put("transactional.id", text(words[4]));
        KafkaProducer<byte[], byte[]> producer = new KafkaProducer<>(all);
        if (words[4] != null)
            producer.initTransactions();
        return producer;
    }

    static void flush(KafkaProducer<byte[], byte[]> producer, byte[][] words) throws Exception {
        List<Future<RecordMetadata>> sent = new ArrayList<>();
        for (int i = 0; i < words.length; ) {
            ProducerRecord<byte[], byte[]> each = new ProducerRecord<>(
                text(words[i]), number(words[i + 1]), Long.parseLong(text(words[i + 2])), words[i + 4], words[i + 3]);
            int count = number(words[i + 5]);
            for (i += 6; count > 0; count--, i += 2)
                each.headers().add(text(words[i]), words[i + 1]);
            sent.add(producer.send(each));
        }
        producer.flush();
        for (Future<RecordMetadata> each : sent)
            each.get();
    }

    static KafkaConsumer<byte[], byte[]> consumer(byte[][] words) {
        Map<String, Object> all = settings(words);
        if (words[1] != null)
            all.put("group.id", text(words[1]));
        Map<String, String> strategies = Map.of("range", "RangeAssignor", "roundrobin", "RoundRobinAssignor",
            "sticky", "StickyAssignor", "cooperative-sticky", "CooperativeStickyAssignor");
        all.put("partition.assignment.strategy", "org.apache.kafka.clients.consumer." + strategies.get(text(words[2])));
        if (words[3] != null)
            all.put("group.instance.id", text(words[3]));
        all.put("isolation.level", text(words[4]));
        all.put("auto.offset.reset", text(words[5]));
        all.put("enable.auto.commit", false);
        all.put("session.timeout.ms", 10000);
        all.put("heartbeat.interval.ms", 200);
        all.put("fetch.max.wait.ms", 100);
        KafkaConsumer<byte[], byte[]> consumer = new KafkaConsumer<>(all);
        List<String> topics = new ArrayList<>();
        for (int i = 6; i < words.length; i++)
            topics.add(text(words[i]));
        if (!topics.isEmpty())
            consumer.subscribe(topics);
        return consumer;
    }

    static List<byte[]> admin(byte[][] words) throws Exception {
        List<byte[]> found = new ArrayList<>();
        try (Admin admin = Admin.create(settings(words))) {
            String name = words.length > 2 ? text(words[2]) : null;
            switch (text(words[1])) {
                case "create":
                    admin.createTopics(List.of(new NewTopic(name, number(words[3]), (short) 1))).all().get();
                    break;
                case "grow":
                    admin.createPartitions(Map.of(name, NewPartitions.increaseTo(number(words[3])))).all().get();
                    break;
                case "topics":
                    for (String each : new TreeSet<>(admin.listTopics().names().get()))
                        Collections.addAll(found, bytes(each),
                            bytes(admin.describeTopics(List.of(each)).allTopicNames().get().get(each).partitions().size()));
                    break;
                case "configure":
                    ConfigResource topic = new ConfigResource(ConfigResource.Type.TOPIC, name);
                    AlterConfigOp set = new AlterConfigOp(new ConfigEntry(text(words[3]), text(words[4])), AlterConfigOp.OpType.SET);
                    admin.incrementalAlterConfigs(Map.of(topic, List.of(set))).all().get();
                    break;
                case "trim":
                    admin.deleteRecords(Map.of(new TopicPartition(name, number(words[3])),
                        RecordsToDelete.beforeOffset(number(words[4])))).all().get();
                    break;
                case "groups":
                    for (ConsumerGroupListing each : admin.listConsumerGroups().all().get())
                        found.add(bytes(each.groupId()));
                    break;
                case "offsets":
                    admin.alterConsumerGroupOffsets(name, Map.of(new TopicPartition(text(words[3]), number(words[4])),
                        new OffsetAndMetadata(number(words[5])))).all().get();
                    break;
                case "forget": admin.deleteConsumerGroups(List.of(name)).all().get(); break;
                case "delete": admin.deleteTopics(List.of(name)).all().get(); break;
                default: throw new IllegalArgumentException(text(words[1]));
            }
        }
        return found;
    }
}
