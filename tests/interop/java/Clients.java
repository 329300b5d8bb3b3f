import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.*;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.TransactionState;
import org.apache.kafka.clients.consumer.*;
import org.apache.kafka.clients.producer.*;
import org.apache.kafka.common.KafkaException;
import org.apache.kafka.common.TopicPartition;

/** Kafka's Java client: produce, consume in a group, transactions.  Prints a line for each fact. */
public class Clients {
    static String bootstrap;

    static Map<String, Object> settings(Object... pairs) {
        Map<String, Object> all = new HashMap<>();
        all.put("bootstrap.servers", bootstrap);
        all.put("key.serializer", "org.apache.kafka.common.serialization.StringSerializer");
        all.put("value.serializer", "org.apache.kafka.common.serialization.StringSerializer");
        all.put("key.deserializer", "org.apache.kafka.common.serialization.StringDeserializer");
        all.put("value.deserializer", "org.apache.kafka.common.serialization.StringDeserializer");
        for (int i = 0; i < pairs.length; i += 2)
            all.put((String) pairs[i], pairs[i + 1]);
        return all;
    }

    static KafkaConsumer<String, String> consumer(Object... pairs) {
        Map<String, Object> all = settings("auto.offset.reset", "earliest", "enable.auto.commit", false,
            "heartbeat.interval.ms", 200, "session.timeout.ms", 10000, "fetch.max.wait.ms", 100);
        for (int i = 0; i < pairs.length; i += 2)
            all.put((String) pairs[i], pairs[i + 1]);
        if ("consumer".equals(all.get("group.protocol")))  // the server decides about these
            all.keySet().removeAll(Arrays.asList("heartbeat.interval.ms", "session.timeout.ms"));
        return new KafkaConsumer<>(all);
    }

    static List<String> read(KafkaConsumer<String, String> consumer, int count) {
        List<String> values = new ArrayList<>();
        long deadline = System.currentTimeMillis() + 30000;
        while (values.size() < count && System.currentTimeMillis() < deadline)
            for (ConsumerRecord<String, String> each : consumer.poll(Duration.ofMillis(100)))
                values.add(each.value());
        return values;
    }

    static void produce() throws Exception {
        for (String codec : new String[] {"none", "gzip", "snappy", "lz4", "zstd"})
            try (KafkaProducer<String, String> producer = new KafkaProducer<>(settings("compression.type", codec))) {
                for (int n = 0; n < 20; n++) {
                    ProducerRecord<String, String> each =
                        new ProducerRecord<>("java", n % 4, 1700000000000L + n, n % 2 == 0 ? null : "k" + n, codec + " " + n);
                    each.headers().add("h", "v".getBytes(StandardCharsets.UTF_8)).add("null", null);
                    producer.send(each);
                }
                producer.flush();
            }
        System.out.println("produced");
    }

    static void group(String strategy) throws Exception {
        String group = "g-" + strategy;
        Object[] all = strategy.endsWith("Assignor")
            ? new Object[] {"group.id", group, "partition.assignment.strategy", "org.apache.kafka.clients.consumer." + strategy}
            : new Object[] {"group.id", group, "group.protocol", "consumer", "group.remote.assignor", strategy};
        Set<String> seen = Collections.synchronizedSet(new TreeSet<>());
        List<Thread> threads = new ArrayList<>();
        int[] owned = new int[2];
        boolean[] done = new boolean[1];
        for (int number = 0; number < 2; number++) {
            int me = number;
            Thread thread = new Thread(() -> {
                try (KafkaConsumer<String, String> consumer = consumer(all)) {
                    consumer.subscribe(Arrays.asList("java"));
                    while (!done[0]) {
                        for (ConsumerRecord<String, String> each : consumer.poll(Duration.ofMillis(50)))
                            seen.add(each.partition() + ":" + each.offset());
                        synchronized (owned) {
                            owned[me] = consumer.assignment().size();
                        }
                        try {
                            consumer.commitSync();
                        } catch (CommitFailedException | org.apache.kafka.common.errors.RebalanceInProgressException rebalance) {
                            // the next owner reads the records again
                        }
                    }
                }
            });
            threads.add(thread);
            thread.start();
        }
        long deadline = System.currentTimeMillis() + 30000;
        int[] shared = new int[2];  // before the first of them leaves
        while (System.currentTimeMillis() < deadline) {
            synchronized (owned) {
                shared = owned.clone();
                if (owned[0] == 2 && owned[1] == 2 && seen.size() == 100)
                    break;
            }
            Thread.sleep(20);
        }
        Thread.sleep(200);
        done[0] = true;
        for (Thread each : threads)
            each.join();
        System.out.println(strategy + " " + seen.size() + " " + shared[0] + " " + shared[1]);
    }

    static void transactions() throws Exception {
        KafkaProducer<String, String> zombie = new KafkaProducer<>(settings("transactional.id", "java"));
        zombie.initTransactions();
        zombie.beginTransaction();
        zombie.send(new ProducerRecord<>("out", "zombie")).get();
        try (KafkaProducer<String, String> producer = new KafkaProducer<>(settings("transactional.id", "java"));
             KafkaConsumer<String, String> consumer = consumer("group.id", "copy")) {
            consumer.subscribe(Arrays.asList("in"));
            List<String> values = read(consumer, 10);
            producer.initTransactions();
            for (String ending : new String[] {"abort", "commit", "abort", "commit"}) {
                producer.beginTransaction();
                for (String each : values)
                    producer.send(new ProducerRecord<>("out", ending + " " + each));
                producer.sendOffsetsToTransaction(
                    Collections.singletonMap(new TopicPartition("in", 0), new OffsetAndMetadata(10)), consumer.groupMetadata());
                if (ending.equals("abort"))
                    producer.abortTransaction();
                else
                    producer.commitTransaction();
                System.out.println(ending + " " + consumer.committed(Collections.singleton(new TopicPartition("in", 0)))
                    .get(new TopicPartition("in", 0)));
            }
        }
        try {
            zombie.send(new ProducerRecord<>("out", "late")).get();
            zombie.commitTransaction();
            System.out.println("not fenced");
        } catch (KafkaException | java.util.concurrent.ExecutionException error) {
            System.out.println("fenced");
        }
        zombie.close(Duration.ofSeconds(1));
        try (KafkaConsumer<String, String> consumer = consumer("isolation.level", "read_committed")) {
            consumer.assign(Arrays.asList(new TopicPartition("out", 0)));
            List<String> values = read(consumer, 20);
            System.out.println("committed " + values.size() + " " + new TreeSet<>(values).size());
        }
    }

    /** A transaction that the coordinator aborts after its time-out. */
    static void late() throws Exception {
        try (KafkaProducer<String, String> producer =
                 new KafkaProducer<>(settings("transactional.id", "late", "transaction.timeout.ms", 500));
             Admin admin = Admin.create(settings())) {
            producer.initTransactions();
            producer.beginTransaction();
            producer.send(new ProducerRecord<>("late", "late")).get();
            long deadline = System.currentTimeMillis() + 30000;
            while (System.currentTimeMillis() < deadline
                   && admin.describeTransactions(Arrays.asList("late")).description("late").get().state() != TransactionState.COMPLETE_ABORT)
                Thread.sleep(20);
            try {
                producer.send(new ProducerRecord<>("late", "later")).get();
                System.out.println("not aborted");
            } catch (KafkaException | java.util.concurrent.ExecutionException error) {
                System.out.println("late");
            }
            producer.abortTransaction();
            producer.beginTransaction();
            producer.send(new ProducerRecord<>("late", "after"));
            producer.commitTransaction();
        } catch (org.apache.kafka.common.errors.ProducerFencedException error) {
            System.out.println("then fenced");  // a client from before transaction version 2
            return;
        }
        try (KafkaConsumer<String, String> consumer = consumer("isolation.level", "read_committed")) {
            consumer.assign(Arrays.asList(new TopicPartition("late", 0)));
            System.out.println("then " + read(consumer, 1));
        }
    }

    public static void main(String[] args) throws Exception {
        bootstrap = args[0];
        produce();
        for (String strategy : new String[] {"RangeAssignor", "CooperativeStickyAssignor", "uniform", "range"})
            group(strategy);
        transactions();
        late();
    }
}
